"""Triton backend of rope: fp32 products and sums without FMA, one rounding to bf16; the same bytes as the CPU backend.

A position outside the table raises when it is seen on the host; in a replayed graph, where nothing can be raised, its rows become NaN.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from rlk.kernels._triton import TritonSource
from rlk.kernels.checked import check_once
from rlk.kernels.direct import differentiable
from rlk.kernels.rope import cpu

SOURCE = TritonSource("rope")
_ELEMENTS = 1024  # pairs of one program, at most


@triton.jit
def _rotate(
    x, positions, table, y, heads, length, token_stride, head_stride,
    HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK)
    position = tl.load(positions + token + tl.arange(0, 1))
    known = (pair < HALF) & (position >= 0) & (position < length)
    entry = table + position * HALF + pair
    cos = tl.load(entry, mask=known, other=float("nan"))[None, :]
    sin = tl.load(entry + length * HALF, mask=known, other=float("nan"))[None, :]
    if INVERSE:
        sin = -sin
    inside = (head < heads)[:, None] & (pair < HALF)[None, :]
    at = x + token * token_stride + head[:, None] * head_stride + pair[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    to = y + (token * heads + head[:, None]) * (2 * HALF) + pair[None, :]
    tl.store(to, (first * cos - second * sin).to(y.dtype.element_ty), mask=inside)
    tl.store(to + HALF, (second * cos + first * sin).to(y.dtype.element_ty), mask=inside)


def rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool) -> torch.Tensor:
    """x rotated by its positions' angles, or back by them; heads of a packed tensor are read in place."""
    x = x if x.stride(2) == 1 else x.contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, heads, half = x.shape[0], x.shape[1], x.shape[2] // 2
    block = triton.next_power_of_2(half)
    each = min(triton.next_power_of_2(heads), max(1, _ELEMENTS // block))
    SOURCE.launch(
        _rotate, (tokens, triton.cdiv(heads, each)), x, positions.contiguous(), table.contiguous(), y, heads, table.shape[1],
        x.stride(0), x.stride(1), op="rope.backward" if inverse else "rope", warps=2, HALF=half, HEADS=each, BLOCK=block, INVERSE=inverse,
    )  # fmt: skip
    return y


@cpu.rope.register_kernel("cuda")
def run_forward(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    check_once(positions, ("rope", table.shape[1]), lambda: cpu.check_positions(positions, table.shape[1]))
    return rotate(x, positions, table, inverse=False)


@cpu.rope_backward.register_kernel("cuda")
def run_backward(dy: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return rotate(dy, positions, table, inverse=True)


rope = differentiable(run_forward, cpu.setup, partial(cpu.backward, run_backward))


def examples() -> None:
    """Calls for the ahead-of-time harness: query heads of Qwen3-8B, read in place from the packed projection."""
    with torch.device("meta"):
        heads = torch.empty(59, 6144, dtype=torch.bfloat16)[:, :4096].unflatten(1, (32, 128))
        positions, table = torch.empty(59, dtype=torch.int64), torch.empty(2, 40960, 64)
        rotate(heads, positions, table, inverse=False)
        rotate(heads, positions, table, inverse=True)
