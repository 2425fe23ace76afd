"""Lost ranks: every survivor ends in time, with the same name. And the pool that hosts such runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlk.parallel.errors import ParallelError
from rlk.parallel.pool import Pool, free_port, require

WORKERS = Path(__file__).with_name("parallel_workers.py")


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, ["torch", "rlk.parallel.rendezvous", "rlk.parallel.collectives"]) as workers:
        yield workers


@pytest.mark.parametrize(("loser", "transport"), [(0, "gloo"), (2, "gloo"), (3, "gloo"), (1, "shm"), (1, "nccl")])
def test_a_killed_rank_is_named_by_every_survivor(pool: Pool, loser: int, transport: str) -> None:
    start = time.monotonic()
    outcomes = pool.run(4, WORKERS, "lost", 4, free_port(), loser, "killed", 30.0, transport, timeout=60)
    assert outcomes[loser].error == f"worker {loser} died with exit code -9"
    survivors = [outcome.value for rank, outcome in enumerate(outcomes) if rank != loser]
    for answer in survivors:
        assert answer["error"].startswith("PeerLostError: ")
        assert f": rank {loser} is gone: its process died" in answer["error"]
    assert time.monotonic() - start < 30


def test_a_rank_that_raised_and_left_is_named(pool: Pool) -> None:
    outcomes = pool.run(4, WORKERS, "lost", 4, free_port(), 1, "raises", 30.0, timeout=60)
    assert outcomes[1].error.startswith("LookupError: planted")
    assert all(": rank 1 is gone" in outcomes[rank].value["error"] for rank in (0, 2, 3))


@pytest.mark.parametrize("transport", ["gloo", "shm", "nccl"])
def test_a_silent_rank_is_named_after_the_timeout(pool: Pool, transport: str) -> None:
    outcomes = pool.run(4, WORKERS, "lost", 4, free_port(), 2, "silent", 3.0, transport, timeout=60)
    for rank in (0, 1, 3):
        answer = outcomes[rank].value
        assert ": rank 2 does not answer: " in answer["error"]
        assert answer["seconds"] < 3 * 3 + 3


def test_ranks_that_share_a_card_are_refused_together(pool: Pool) -> None:
    said = require(pool.run(4, WORKERS, "cards", 4, free_port(), ["a", "b", "c", "b"], timeout=60))
    assert set(said) == {"ProcessGroupError: rank 1 and rank 3 share card b: use transport shm, or one card per rank for nccl and peer"}
    assert set(require(pool.run(4, WORKERS, "cards", 4, free_port(), ["a", "b", "c", "d"], timeout=60))) == {'"no error"'}


def test_dead_workers_are_replaced(pool: Pool) -> None:
    pool.kill(0)
    (outcome,) = pool.run(1, WORKERS, "first_use", 1, 0, timeout=30)
    assert outcome.error == "worker 0 died with exit code -9"
    assert require(pool.run(1, WORKERS, "first_use", 1, 0, timeout=30)) == [[0, 0, 0]]


def test_a_worker_without_an_answer_is_killed(pool: Pool) -> None:
    outcomes = pool.run(1, WORKERS, "lost", 1, 0, 0, "silent", 50.0, timeout=1)
    assert outcomes[0].error == "worker 0 gave no answer in time and was killed"
    with pytest.raises(ParallelError, match="no attribute 'nothing'"):
        require(pool.run(1, WORKERS, "nothing", timeout=30))
