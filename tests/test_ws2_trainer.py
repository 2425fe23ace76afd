"""The trainer on two processes: equal bytes to one, states read at another topology, and every refusal on every rank."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk.contract.numerics import ContractError
from rlk.model.config import Qwen3Config
from rlk.model.layout import hf_shapes
from rlk.model.weights import save_checkpoint
from rlk.parallel.pool import Pool, free_port, require
from rlk.train import process
from rlk.train.trainer import MegatronTrainer

WORKERS = Path(__file__).with_name("ws2_faults.py")
CONFIG = Qwen3Config(
    vocab_size=260, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    head_dim=32, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=512,
)  # fmt: skip
PAIRS = ((2, 1), (1, 2))


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(2, ["rlk.train.trainer"]) as workers:
        yield workers


def random_checkpoint(path: Path, seed: int = 0) -> Path:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda shape: torch.randn(shape, generator=generator)
    weights = {n: (1 + 0.1 * draw(s) if "norm" in n else 0.06 * draw(s)).bfloat16() for n, s in hf_shapes(CONFIG).items()}
    save_checkpoint(path, CONFIG, weights)
    return path


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


def run(pool: Pool, pair: tuple[int, int], function: str, **job: object) -> list[Any]:
    tp, cp = pair
    port = free_port() if tp * cp > 1 else 0
    return require(pool.run(tp * cp, WORKERS, function, {"tp": tp, "cp": cp, "port": port, "timeout": 30.0, **job}, timeout=120))


def test_updates_and_states_are_equal_at_every_topology(pool: Pool, checkpoint: Path, tmp_path: Path) -> None:
    found = {}
    states = tmp_path / "tp1cp1" / "state"
    for pair in ((1, 1), *PAIRS):
        out = tmp_path / "tp{}cp{}".format(*pair)
        out.mkdir()
        found[pair] = run(pool, pair, "resume", checkpoint=str(checkpoint), out=str(out), state=str(states))
        states = out / "state"  # the next topology reads what this one wrote
    (expected,) = found[1, 1]
    assert expected["resumed"] == expected["second"]
    assert expected["published"] == expected["loaded"] == expected["second"]["model_hash_after"]
    assert expected["same_scores"]
    for pair in PAIRS:
        assert found[pair] == [expected] * 2
        files = [(tmp_path / name / "state" / "optimizer.safetensors").read_bytes() for name in ("tp1cp1", "tp{}cp{}".format(*pair))]
        assert files[0] == files[1]


@pytest.mark.parametrize("pair", PAIRS)
def test_whatever_one_rank_gets_wrong_every_rank_refuses(pool: Pool, checkpoint: Path, tmp_path: Path, pair: tuple[int, int]) -> None:
    first, last = run(pool, pair, "refuse", checkpoint=str(checkpoint), out=str(tmp_path))
    tp, cp = pair
    odd = f"rank 1 (tp {tp - 1}, cp {cp - 1})"
    assert first["id"] == last["id"] == "IndexError: sample 0: id 261 is outside 0…259: drop masked tokens"
    for name in ("micro batch", "one sample fewer", "another retained id", "another lr"):
        assert first[name] == last[name]
        assert first[name].startswith("MismatchError: ranks differ: rank 0 (tp 0, cp 0) has ")
        assert f"{odd} has " in first[name]
    assert "3 samples of 67 tokens" in first["one sample fewer"]
    assert "2 samples of 61 tokens" in first["one sample fewer"]
    assert first["trace"] == last["trace"] == "ValueError: intermediates are recorded in a world of one: trace with TP = CP = 1"
    assert last["padded row"].startswith("OptimizerError: m of lm_head has a padded row")
    assert first["padded row"] == f"PeerFailedError: {odd} raised {last['padded row']}"
    assert first["infinity"] == last["infinity"]
    row = "4" if tp > 1 else r"\d+"  # the first row that is scored; a rank of CP counts its own
    assert re.match(rf"NonFiniteError: logits of packed row {row} are not finite", first["infinity"]), first["infinity"]
    assert last["state"].startswith("PeerFailedError: rank 0 (tp 0, cp 0) raised StateError: ")
    assert first["state"].startswith("StateError: ")


def test_ranks_that_start_differently_are_refused(pool: Pool, checkpoint: Path, tmp_path: Path) -> None:
    other = random_checkpoint(tmp_path / "other", seed=1)
    said = run(pool, (2, 1), "start", checkpoints=[str(checkpoint), str(other)])
    assert said[0] == said[1]
    assert said[0].startswith("MismatchError: ranks differ: rank 0 (tp 0, cp 0) has checkpoint: ")
    (alone,) = run(pool, (1, 1), "start", checkpoint=str(checkpoint), port=0, timeout=5.0)
    assert alone == "no error"


def test_topologies_that_cannot_be_are_refused(checkpoint: Path) -> None:
    process.stop()  # a test of another file may have joined a job of one in this process
    with pytest.raises(ContractError, match="tp=3 does not divide"):
        MegatronTrainer(checkpoint, tp=3)
    with pytest.raises(ContractError, match="native mode with TP=2, CP=1"):
        MegatronTrainer(checkpoint, mode="native", tp=2)
    with pytest.raises(RuntimeError, match="a job of 2 needs one port"):
        MegatronTrainer(checkpoint, cp=2)
    with pytest.raises(RuntimeError, match="rank 2 is outside a job of 2"):
        MegatronTrainer(checkpoint, cp=2, rank=2, port=1)
