"""det_gemm on a card beside torch's default product, at the linear layers of Qwen3-8B; recorded, never a gate.

    PYTHONPATH=. python3 benchmarks/operators/bench_det_gemm_cuda.py       # every case; writes $OUT/det_gemm.json
    pytest benchmarks/operators/bench_det_gemm_cuda.py -k "qkv and forward"   # some of them, by pytest-benchmark

Each case first compares every byte with the canonical chain, one Triton tile for all shapes. Only then the arms are timed: captured graphs,
interleaved round by round, second-level cache flushed before each, the card's own clock. The ratio is the median of det_gemm over the
median of torch, which multiplies the same values without a fixed order and rounds to bf16. Weight gradients are fp32 here; torch with
fp32 results is timed beside them (``torch_fp32_us``), the ratio stays that of bf16.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))

from report import environment, graphed, microseconds

from rlk.contract.models import QWEN3_8B
from rlk.contract.topology import token_leaves
from rlk.kernels.det_gemm import det_gemm, det_gemm_weight_grad, sm90, sm90_tokens
from rlk.kernels.det_gemm import triton as backend
from rlk.kernels.det_gemm.sm90_plans import product_plan
from rlk.kernels.det_gemm.triton_tiles import Tile

if TYPE_CHECKING:
    from pytest_benchmark.fixture import BenchmarkFixture

Run = Callable[[], Any]
ROWS = (1, 8, 16, 64, 256, 1024, 4096, 8192)
"""Rows that the geometric means are over."""
MORE_ROWS = (128, 512, 2048)
FEW_ROWS = (1, 8, 16, 64)
TOKENS = (256, 1024, 4096, 8192)
LEAVES = 8
SHARDS = 8
SPLIT_FORWARD = ("o_proj", "down_proj")
LAYERS = {layer.name: (layer.n, layer.k) for layer in QWEN3_8B.gemms() if layer.name != "lm_head"}
ROUNDS = 15
CHAIN, TOKEN_CHAIN = Tile(64, 64, 64, 4, 3), Tile(64, 64, 32, 4, 3)


@dataclass(frozen=True)
class Case:
    """kind: "forward", "input gradient", "weight gradient" or "shard" (of TP8, forward); layer of Qwen3-8B; rows: tokens."""

    kind: str
    layer: str
    rows: int

    def __str__(self) -> str:
        return f"{self.layer}/8 forward {self.rows}" if self.kind == "shard" else f"{self.layer} {self.kind} {self.rows}"

    @property
    def sizes(self) -> tuple[int, int]:
        """Outputs and inputs of the weight: a shard divides what its layer's order leaves whole."""
        n, k = LAYERS[self.layer]
        if self.kind != "shard":
            return n, k
        return (n, k // SHARDS) if self.layer in SPLIT_FORWARD else (n // SHARDS, k)

    @property
    def leaves(self) -> int:
        if self.kind == "weight gradient":
            return LEAVES
        split = (self.layer in SPLIT_FORWARD) == (self.kind == "forward")
        return LEAVES if split and self.kind != "shard" else 1


CASES = [
    *(Case("weight gradient", layer, rows) for rows in TOKENS for layer in LAYERS),
    *(Case("shard", layer, rows) for layer in LAYERS for rows in FEW_ROWS),
    *(Case("forward", layer, rows) for layer in LAYERS for rows in ROWS),
    *(Case("input gradient", layer, 4096) for layer in LAYERS),
    *(Case("forward", layer, rows) for layer in LAYERS for rows in MORE_ROWS),
]


@dataclass(frozen=True)
class Arms:
    """What is timed, and the bytes that det_gemm must have; plan: what computes them."""

    timed: dict[str, Run]
    wanted: torch.Tensor
    plan: str


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


def arms(case: Case) -> Arms:
    """The operands of a case, fresh, and what to run on them."""
    n, k = case.sizes
    if case.kind == "weight gradient":
        order = token_leaves((case.rows // 4,) * 4)
        index, offsets = torch.tensor(order.index, device="cuda"), torch.tensor(order.offsets, device="cuda")
        x, dy = _random(case.rows, k), _random(case.rows, n)
        wanted = backend.weight_grad("chain", x, dy, index, offsets, TOKEN_CHAIN)
        timed: dict[str, Run] = {"torch": lambda: torch.mm(dy.T, x), "torch_fp32": lambda: torch.mm(dy.T, x, out_dtype=torch.float32)}
        timed["det_gemm"] = lambda: det_gemm_weight_grad(x, dy, index, offsets)
        return Arms(timed, wanted, sm90_tokens.__name__ if sm90_tokens.takes(x, dy, LEAVES) else "Triton")
    across = case.kind == "input gradient"
    fp32 = case.kind == "shard" and case.layer in SPLIT_FORWARD
    a, w = _random(case.rows, n if across else k), _random(n, k)
    wanted = torch.empty(case.rows, k if across else n, dtype=torch.float32 if fp32 else torch.bfloat16, device="cuda")
    backend.contract("chain", a, w, across, case.leaves, wanted, CHAIN, True)
    plan = str(product_plan(case.rows, wanted.shape[1], case.leaves, across) or "Triton")
    if across:
        return Arms(
            {"torch": lambda: torch.mm(a, w), "det_gemm": lambda: torch.ops.rlk.det_gemm_input_grad(a, w, case.leaves)}, wanted, plan
        )
    ours = lambda: det_gemm(a, w, splits=case.leaves, out_dtype=wanted.dtype)
    return Arms({"torch": lambda: torch.nn.functional.linear(a, w), "det_gemm": ours}, wanted, plan)


class Measured:
    """One case: compared, then ready to be timed round by round."""

    def __init__(self, case: Case) -> None:
        self.case, self.arms = case, arms(case)
        found, wanted = self.arms.timed["det_gemm"](), self.arms.wanted
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), f"{case}: bytes differ, no time is shown"
        self.flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
        self.replays = {arm: graphed(run)[0] for arm, run in self.arms.timed.items()}
        self.times: dict[str, list[float]] = {arm: [] for arm in self.replays}

    def round(self) -> None:
        for arm, replay in self.replays.items():
            self.times[arm].append(microseconds(replay, self.flush))

    def row(self) -> dict[str, Any]:
        quartiles = {arm: [round(q, 2) for q in statistics.quantiles(values, n=4)] for arm, values in self.times.items()}
        n, k = self.case.sizes
        return {
            "rows": self.case.rows, "n": n, "k": k, "leaves": self.case.leaves, "plan": self.arms.plan,
            **{f"{arm}_us": values for arm, values in quartiles.items()},
            "ratio": round(quartiles["det_gemm"][1] / quartiles["torch"][1], 3),
        }  # fmt: skip


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Geometric mean and worst ratio over the rows that stand for a line of the table; a line without a case is left out."""
    lines: dict[str, list[Case]] = {
        **{f"{layer} forward": [Case("forward", layer, m) for m in ROWS] for layer in LAYERS},
        "plain order": [Case("forward", layer, m) for layer in LAYERS if layer not in SPLIT_FORWARD for m in ROWS],
        "split order": [Case("forward", layer, m) for layer in SPLIT_FORWARD for m in ROWS],
        "shards of TP8, at most 64 rows": [case for case in CASES if case.kind == "shard"],
        "input gradient, 4096 rows": [case for case in CASES if case.kind == "input gradient"],
        **{f"weight gradient, {m} tokens": [Case("weight gradient", layer, m) for layer in LAYERS] for m in TOKENS},
    }
    found = {line: [rows[str(case)]["ratio"] for case in cases if str(case) in rows] for line, cases in lines.items()}
    mean = lambda ratios: math.exp(sum(map(math.log, ratios)) / len(ratios))
    return {
        line: {"cases": len(ratios), "geometric_mean": round(mean(ratios), 3), "worst": max(ratios)}
        for line, ratios in found.items()
        if ratios
    }


def main() -> None:
    torch.manual_seed(0)
    rows: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for case in CASES:
        try:
            measured = Measured(case)
            for _ in range(ROUNDS + 1):
                measured.round()
            for values in measured.times.values():
                del values[0]
            rows[str(case)] = measured.row()
            print(f"{case}: {rows[str(case)]['ratio']}", flush=True)
        except (AssertionError, RuntimeError, ValueError) as error:
            failed[str(case)] = f"{type(error).__name__}: {str(error)[:300]}"
            print(f"{case}: {failed[str(case)]}", flush=True)
        result = {
            "name": "det_gemm", "date": time.strftime("%Y-%m-%d", time.gmtime()), **environment(),
            "kernels": [source.SOURCE.kernel_id for source in (sm90, sm90_tokens, backend)],
            "what": __doc__.split("\n\n")[2].replace("\n", " ").strip(), "summary": summary(rows), "failed": failed, "times": rows,
        }  # fmt: skip
        (Path(os.environ.get("OUT", ".")) / "det_gemm.json").write_text(json.dumps(result, indent=1) + "\n")
    for line, ratios in result["summary"].items():
        print(f"{line:34s} {ratios['geometric_mean']:.3f} (worst {ratios['worst']:.3f}, {ratios['cases']} cases)")
    sys.exit(1 if failed else 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_speed(benchmark: BenchmarkFixture, case: Case) -> None:
    measured = Measured(case)
    benchmark.pedantic(measured.round, rounds=ROUNDS, warmup_rounds=1)
    benchmark.group = case.kind
    benchmark.extra_info.update(measured.row(), peak_bytes=torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
