"""Checks every plan of the Hopper products on a card, with no pytest and no install of rlk:

    PYTHONPATH=. python3 tests/gpu/check_sm90.py [section ...]

Writes $OUT/sm90.json and exits 1 if a check failed.
"""

from __future__ import annotations

from functools import partial

import torch
from report import Report, graphed, main

from rlk.contract.topology import token_leaves
from rlk.kernels.det_gemm import sm90, sm90_plans, sm90_tokens
from rlk.kernels.det_gemm import triton as gemm
from rlk.kernels.det_gemm.sm90_plans import MOST_LEAVES, Plan
from rlk.kernels.det_gemm.triton_tiles import Tile

CHAIN, TOKEN_CHAIN = Tile(64, 64, 64, 4, 3), Tile(64, 64, 32, 4, 3)
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


RAGGED = (1500, 700, 333, 900, 600, 63)
SAMPLES = (
    *((lengths, 320, 640) for lengths in ((1024,) * 4, (300, 7, 129, 16), (1,), (1000, 1024, 3), (5,) * 70)),
    *((lengths, 4160, 4096) for lengths in ((1024,) * 4, RAGGED, (300, 7, 129, 16))),
)
"""Lengths of samples, widths of dy and of x; the wide ones have several tiles for each block."""


def tokens(report: Report) -> None:
    """Weight gradients have the chain's bytes for runs of tokens of any length and slices of columns; so does a replayed graph."""
    torch.manual_seed(0)
    for lengths, n, k in SAMPLES:
        order, count = token_leaves(lengths), sum(lengths)
        index, offsets = torch.tensor(order.index, device="cuda"), torch.tensor(order.offsets, device="cuda")
        x, dy = torch.randn(count, k, device="cuda").bfloat16()[:, 64:], torch.randn(count, n, device="cuda").bfloat16()
        x[:, :16] = -0.0
        x[count // 2, 20], dy[count // 3, 3] = torch.inf, torch.nan
        dy[:, 8:12] *= 2.0**100
        x[:, 40:48] *= 2.0**-100
        wanted = gemm.weight_grad("det_gemm.weight_grad", x, dy, index, offsets, TOKEN_CHAIN)
        found = torch.full_like(wanted, 7.0)
        run = partial(sm90_tokens.weight_grad, "det_gemm.weight_grad", x, dy, index, offsets, found)
        run()
        report.same("sm90 weight gradient", f"{lengths} {n} {k}", _bits(found), _bits(wanted))
        replay, _ = graphed(run)
        found.fill_(7.0)
        replay()
        report.same("sm90 weight gradient in a graph", f"{lengths} {n} {k}", _bits(found), _bits(wanted))
        report.same(
            "sm90 weight gradient, as chosen",
            f"{lengths} {n} {k}",
            _bits(gemm.weight_grad("det_gemm.weight_grad", x, dy, index, offsets)),
            _bits(wanted),
        )
        if lengths == SAMPLES[0][0]:
            moved = torch.cat([index[1:32], index[:1], index[32:]])  # a token goes from one group to another
            sm90_tokens.weight_grad("det_gemm.weight_grad", x, dy, moved, offsets, found)
            report.differs("a token in another group", found[12:, 64:], wanted[12:, 64:])


def planted(report: Report) -> None:
    """Four leaves for eight: the comparison sees another tree."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 4096, device="cuda").bfloat16(), torch.randn(4096, 4096, device="cuda").bfloat16()
    found, wanted = (x.new_empty(64, 4096, dtype=torch.float32) for _ in range(2))
    gemm.contract("det_gemm", x, w, False, MOST_LEAVES, wanted, CHAIN, True)
    sm90.contract("det_gemm", x, w, False, MOST_LEAVES // 2, found, Plan(2, 128, 4))
    report.differs("four leaves for eight", found, wanted)


if __name__ == "__main__":
    main("sm90", {**{name: partial(plans, name=name) for name in TABLES}, "weight gradient": tokens, "planted": planted})
