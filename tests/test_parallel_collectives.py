"""Canonical collectives on 2 and 4 processes: tree order whatever the message size, exact moves, one error on every rank."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlk.contract.orders import fold_pairs
from rlk.contract.topology import owned
from rlk.parallel.pool import Pool, free_port, require

WORKERS = Path(__file__).with_name("parallel_workers.py")
COUNTS = (1, 3, 4, 7, 64, 1001)
MESSAGES = {"gloo": (1 << 28, 64, 4), "shm": (1 << 26, 1 << 11), "nccl": (1 << 28, 1 << 11)}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(4, ["torch", "rlk.parallel.rendezvous", "rlk.parallel.collectives"]) as workers:
        yield workers


def run(pool: Pool, size: int, function: str, *arguments: object) -> list:
    return require(pool.run(size, WORKERS, function, size, free_port(), *arguments, timeout=60))


def parts(size: int, count: int) -> torch.Tensor:
    """The same as in the workers."""
    generator = torch.Generator().manual_seed(count)
    exponents = torch.randint(-12, 12, (size, count), generator=generator)
    return torch.randn(size, count, generator=generator) * 2.0**exponents


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize(("size", "transport"), [(2, "gloo"), (4, "gloo"), (2, "shm"), (4, "shm"), (4, "nccl")])
def test_sums_are_tree_sums_at_every_message_size(pool: Pool, size: int, transport: str) -> None:
    answers = run(pool, size, "sums", COUNTS, MESSAGES[transport], transport)
    differs = 0
    for count in COUNTS:
        held = parts(size, count)
        tree = fold_pairs(list(held), torch.add)
        ring = held[0]
        for row in held[1:]:
            ring = ring + row
        differs += int((tree != ring).sum())
        width = -(-count // size)
        for rank, answer in enumerate(answers):
            for message in MESSAGES[transport]:
                found = answer["sums"][f"{count}/{message}"]
                assert found["fp32"] == bits(tree)
                assert found["bf16"] == bits(tree.bfloat16())
                assert found["piece"] == bits(torch.nn.functional.pad(tree, (0, width * size - count))[rank * width : (rank + 1) * width])
                assert found["many"] == [bits(tree), bits(tree[: count // 2]), []]
    # Control: the ring order, which transports use, gives other bytes as soon as there are more than two ranks.
    assert (differs > 0) == (size > 2)


def test_traffic_is_what_a_rank_sends(pool: Pool) -> None:
    for answer in run(pool, 4, "sums", (8,), (1 << 28,)):
        rows = {(row["group"], row["op"]): row for row in answer["traffic"]}
        exchanged, gathered = rows["world", "all_to_all"], rows["world", "all_gather"]
        # Four sums: 8, 8 and 8 elements, then 12 in one bucket; three quarters of each leave the rank.
        assert (exchanged["calls"], exchanged["bytes_sent"]) == (4, 3 * (2 + 2 + 2 + 3) * 4)
        # Pieces of 2 fp32, 2 bf16 and 3 fp32, each filled to 16 bytes.
        assert (gathered["calls"], gathered["bytes_sent"]) == (3, 3 * (16 + 16 + 16))


@pytest.mark.parametrize("transport", ["gloo", "shm", "nccl"])
def test_gathers_move_bytes_exactly(pool: Pool, transport: str) -> None:
    expected = []
    for rank in range(4):
        expected.append(
            [
                torch.full((3,), rank, dtype=torch.uint8), torch.tensor(float(rank)), torch.zeros(0, 4),
                torch.arange(6).reshape(2, 3).t() + rank, torch.tensor([-0.0, float("nan"), 1.5 + rank]).bfloat16(),
                torch.tensor([rank % 2 == 0, True]),
            ]
        )  # fmt: skip
    for answer in run(pool, 4, "gathers", transport):
        for at, (shape, dtype, raw) in enumerate(answer):
            joined = torch.stack([row[at] for row in expected])
            assert (shape, dtype, raw) == (list(joined.shape), str(joined.dtype), bits(joined))


def test_texts_and_failures_reach_every_rank(pool: Pool) -> None:
    answers = run(pool, 4, "together")
    for rank, answer in enumerate(answers):
        assert answer["share"] == ["", "é" * 300, "é" * 600, "é" * 900]
        assert answer["lead"] == "by 0"
        other = "PeerFailedError: rank {} raised LookupError: planted"
        assert answer["one fails"] == ("LookupError: planted" if rank == 1 else other.format(1))
        assert answer["first fails"] == ("LookupError: planted" if rank == 0 else other.format(0))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("agreement", ("agreement: version 1", "agreement: version 2")),
        ("shape", ("float32[4]", "float32[5]")),
        ("dtype", ("all_gather_many of float32[4]", "all_gather_many of float64[4]")),
        ("operation", ("tree_reduce_scatter of float32[4]", "all_gather_many of float32[4]")),
        ("unit", ("step: 36 tokens", "step: 37 tokens")),
    ],
)
def test_a_mismatch_raises_on_every_rank(pool: Pool, size: int, kind: str, words: tuple[str, str]) -> None:
    answers = run(pool, size, "mismatch", kind)
    assert len(set(answers)) == 1
    assert answers[0].startswith("MismatchError: ranks differ: ")
    for word in (*words, f"rank {size - 1} has"):
        assert word in answers[0]


def test_signatures_are_checked_at_first_use_and_outside_units(pool: Pool) -> None:
    # A unit is one check; inside the first one the sum's exchange and gather are checked as well.
    assert run(pool, 2, "first_use") == [[3, 1, 2]] * 2


ints = st.integers(0, 2**32 - 1)


@given(st.lists(st.lists(ints, min_size=3, max_size=3), min_size=8, max_size=8), st.sampled_from([1, 2, 4, 8]))
def test_subtrees_of_ranks_add_like_one_rank(raw: list[list[int]], ranks: int) -> None:
    """Any fp32 bit patterns, NaN payloads aside: folding each rank's parts and then the ranks' roots adds the same pairs."""
    values = [[struct.unpack("f", struct.pack("I", v))[0] for v in row] for row in raw]
    held = torch.tensor(values, dtype=torch.float32)
    whole = fold_pairs(list(held), torch.add)
    roots = [fold_pairs([held[s] for s in owned(ranks, rank)], torch.add) for rank in range(ranks)]
    joined = fold_pairs(roots, torch.add)
    assert torch.equal(torch.where(whole.isnan(), 0, whole.view(torch.int32)), torch.where(joined.isnan(), 0, joined.view(torch.int32)))
    assert torch.equal(whole.isnan(), joined.isnan())
