"""The trainer's side of the chain: layouts, loss and gradients compared in its own process, and the rows that it hands on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from acceptance import chain
from rlk.contract.arithmetic import trace_names
from rlk.contract.models import TINY
from rlk.contract.numerics import DEFAULT
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.evidence.schema import Comparison
from rlk.model.layout import hf_shapes
from rlk.model.weights import load_checkpoint
from rlk.parallel.pool import Pool, require

SHAPES = ((5, 3), (40, 9), (1, 6))
POSITIONS = [[p for p in range(prompt + answer) if p < 4 or p % 7 == 0] for prompt, answer in SHAPES]


@pytest.fixture(scope="module")
def answer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What the worker returns and writes for three samples of the tiny model."""
    out = tmp_path_factory.mktemp("chain") / "train.safetensors"
    generator = torch.Generator().manual_seed(3)
    draw = lambda count: tuple(torch.randint(0, 250, (count,), generator=generator).tolist())
    requests = [Request(i, draw(prompt), SamplingParams(0.7, max_tokens=n)) for i, (prompt, n) in enumerate(SHAPES)]
    responses = [Response(r.sample_id, r.prompt_ids, draw(n), (0.0,) * n, None, "length", 0, 0) for r, (_, n) in zip(requests, SHAPES)]
    job = {
        "checkpoint": str(model), "device": "cpu", "numerics": asdict(DEFAULT), "positions": POSITIONS,
        "permutation": [2, 0, 1], "learner": 1, "out": str(out),
        "requests": [asdict(r) for r in requests], "responses": [asdict(r) for r in responses],
    }  # fmt: skip
    with Pool(1) as pool:
        require(pool.run(1, chain.WORKER, "load", job, timeout=300))
        (found,) = require(pool.run(1, chain.WORKER, "chain", job, timeout=300))
    return found, load_file(out)


def test_every_layout_and_gradient_is_compared_and_equal(answer: tuple[dict[str, Any], Any], model: Path) -> None:
    found = {name: [Comparison.model_validate(c) for c in held] for name, held in answer[0]["judgments"].items()}
    names = {name: [c.name for c in held] for name, held in found.items()}
    everything = sorted(trace_names(TINY.layers))
    assert sorted(names["batch_of_one"]) == sorted(names["permuted"]) == everything
    assert names["loss"] == ["loss", "slope"]
    assert names["gradients"] == list(hf_shapes(load_checkpoint(model).config))
    assert [c.name for held in found.values() for c in held if not c.equal] == []
    assert answer[0]["model_hash"] == load_checkpoint(model).model_hash
    ran = {use["op"] for use in answer[0]["engine"]["kernels"]}
    assert {"attention.backward", "det_gemm.weight_grad", "logp"} <= ran


def test_the_kept_rows_are_handed_on_with_their_places(answer: tuple[Any, dict[str, torch.Tensor]]) -> None:
    rows = answer[1]
    assert len(rows) == 2 * len(SHAPES) * len(trace_names(TINY.layers))
    for sample, kept in enumerate(POSITIONS):
        assert rows[f"{sample}/layers.1.swiglu.positions"].tolist() == kept
        assert len(rows[f"{sample}/logits"]) == len(kept)


def test_a_long_sequence_keeps_both_sides_of_edges_and_its_end() -> None:
    kept = chain.kept_positions(2056)
    assert {0, 63, 127, 128, 129, 255, 256, 2047, 2048, 2055} <= set(kept)
    assert len(kept) < 160
    assert chain.kept_positions(19) == list(range(19))
