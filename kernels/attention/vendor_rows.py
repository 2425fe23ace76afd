"""Copies of packed keys and values in which every sequence starts at a block of its own and is followed by +0.

The vendor's library reads whole tiles. What it masks it multiplies by 0, so a NaN or Inf of the next sequence would show.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk.kernels._triton import TritonSource
from rlk.kernels.attention.vendor_library import BLOCK

SOURCE = TritonSource("attention")
_SEARCH = tl.constexpr(256)


@triton.jit(do_not_specialize=["count"])
def attention_place_rows(
    k, v, placed_k, placed_v, places, count, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One block of rows of one head. Grid: (blocks, heads)."""
    block = tl.program_id(0)
    head = tl.program_id(1)
    before = 0
    for base in range(0, count, _SEARCH):
        i = base + tl.arange(0, _SEARCH)
        first = tl.load(places + i * 3 + 2, mask=i < count, other=0)
        before += tl.sum(((i < count) & (first <= block)).to(tl.int32), 0)
    at = places + (before - 1) * 3
    offset = (block - tl.load(at + 2)) * ROWS + tl.arange(0, ROWS)
    row = tl.load(at) + offset
    d = tl.arange(0, BLOCK_D)
    inside = (d < DIM)[None, :]
    real = (offset < tl.load(at + 1))[:, None] & inside
    target = ((block.to(tl.int64) * ROWS + tl.arange(0, ROWS)) * tl.num_programs(1) + head)[:, None] * DIM + d[None, :]
    keys = tl.load(k + (row * k_row_stride + head * k_head_stride)[:, None] + d[None, :], mask=real, other=0.0)
    values = tl.load(v + (row * v_row_stride + head * v_head_stride)[:, None] + d[None, :], mask=real, other=0.0)
    tl.store(placed_k + target, keys, mask=inside)
    tl.store(placed_v + target, values, mask=inside)


def place_rows(k: torch.Tensor, v: torch.Tensor, places: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """k, v [rows, Hk, D] of any strides to [128·blocks, Hk, D] each.

    places: [S, 3] int64, of each sequence its first row, its rows and its first block in the copy, ascending. What follows a sequence in
    its last block is +0.
    """
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    _, heads, dim = k.shape
    placed_k, placed_v = k.new_empty(2, BLOCK * blocks, heads, dim).unbind()
    if blocks:
        SOURCE.launch(
            attention_place_rows, (blocks, heads), k, v, placed_k, placed_v, places, len(places), *k.stride()[:2], *v.stride()[:2],
            op=None, warps=8, DIM=dim, BLOCK_D=triton.next_power_of_2(dim), ROWS=BLOCK,
        )  # fmt: skip
    return placed_k, placed_v
