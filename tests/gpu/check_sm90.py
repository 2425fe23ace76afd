"""Checks every plan of the Hopper products on a card, with no pytest and no install of rlk:

    PYTHONPATH=. python3 tests/gpu/check_sm90.py [section ...]

Writes $OUT/sm90.json and exits 1 if a check failed.
"""

from __future__ import annotations

from functools import partial

import torch
from report import Report, graphed, main

from rlk.kernels.det_gemm import sm90, sm90_plans
from rlk.kernels.det_gemm import triton as gemm
from rlk.kernels.det_gemm.sm90_plans import MOST_LEAVES, Plan
from rlk.kernels.det_gemm.triton_tiles import Tile

CHAIN = Tile(64, 64, 64, 4, 3)
SHAPES = ((300, 520, 1024), (1, 136, 1024), (129, 256, 512), (64, 4096, 4096))
TABLES = {
    "plain": (sm90_plans._PLAIN, 1, False),
    "split": (sm90_plans._SPLIT, MOST_LEAVES, False),
    "input gradient, plain": (sm90_plans._ACROSS_PLAIN, 1, True),
    "input gradient, split": (sm90_plans._ACROSS_SPLIT, MOST_LEAVES, True),
}


def _operands(rows: int, columns: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values with signed zeros, a row of infinities, one of NaN and one of −0 where there are many rows."""
    x, w = torch.randn(rows, depth, device="cuda").bfloat16(), torch.randn(columns, depth, device="cuda").bfloat16()
    w[:, :32] = -0.0
    if rows > 8:
        x[3, 5], x[4, 7], x[7] = torch.inf, torch.nan, -0.0
    return x, w


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def plans(report: Report, name: str) -> None:
    """Every plan of one table gives the chain's bytes, at ragged edges and for extreme values; so does a replayed graph of it."""
    table, leaves, across = TABLES[name]
    torch.manual_seed(0)
    for plan in dict.fromkeys(plan for *_, plan in table if plan):
        for shape in SHAPES:
            for dtype in (torch.bfloat16, torch.float32):
                _compare(report, name, plan, shape, leaves, across, dtype)


def _compare(report: Report, name: str, plan: Plan, shape: tuple[int, int, int], leaves: int, across: bool, dtype: torch.dtype) -> None:
    rows, columns, depth = shape
    x, w = _operands(rows, columns, depth)
    wanted, found = (torch.full((rows, columns), 7.0, dtype=dtype, device="cuda") for _ in range(2))
    gemm.contract("det_gemm", x, w, False, leaves, wanted, CHAIN, True)
    run = partial(sm90.contract, "det_gemm", x, w.T.contiguous() if across else w, across, leaves, found, plan)
    run()
    report.same(f"sm90 {name}", f"{plan} {shape} {dtype}", _bits(found), _bits(wanted))
    replay, _ = graphed(run)
    found.fill_(7.0)
    replay()
    report.same(f"sm90 {name} in a graph", f"{plan} {shape} {dtype}", _bits(found), _bits(wanted))


def planted(report: Report) -> None:
    """Four leaves for eight: the comparison sees another tree."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 4096, device="cuda").bfloat16(), torch.randn(4096, 4096, device="cuda").bfloat16()
    found, wanted = (x.new_empty(64, 4096, dtype=torch.float32) for _ in range(2))
    gemm.contract("det_gemm", x, w, False, MOST_LEAVES, wanted, CHAIN, True)
    sm90.contract("det_gemm", x, w, False, MOST_LEAVES // 2, found, Plan(2, 128, 4))
    report.differs("four leaves for eight", found, wanted)


if __name__ == "__main__":
    main("sm90", {**{name: partial(plans, name=name) for name in TABLES}, "planted": planted})
