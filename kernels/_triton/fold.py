"""Joins the fp32 partial sums of leaves that separate programs computed: the tree of adjacent pairs, element by element."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk.kernels._triton.launch import TritonSource
from rlk.kernels._triton.numerics import with_quiet_nan

_BLOCK = 1024


@triton.jit
def _subtree(parts, size, at, inside, FIRST: tl.constexpr, COUNT: tl.constexpr):
    if COUNT == 1:
        return tl.load(parts + FIRST * size + at, mask=inside, other=0.0)
    else:  # noqa: RET505
        left = _subtree(parts, size, at, inside, FIRST, COUNT // 2)
        return left + _subtree(parts, size, at, inside, FIRST + COUNT // 2, COUNT // 2)


@triton.jit
def _fold(parts, out, size, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = _subtree(parts, size.to(tl.int64), at, inside, 0, COUNT)
    tl.store(out + at, with_quiet_nan(value, out.dtype.element_ty), mask=inside)


def fold_leaves(source: TritonSource, parts: torch.Tensor, out: torch.Tensor) -> None:
    """out = pair tree over the first dimension of ``parts`` [leaves, *out.shape] fp32, rounded once to out's dtype (bf16 or fp32)."""
    size = out.numel()
    grid = (triton.cdiv(size, _BLOCK),)
    source.launch(_fold, grid, parts, out, size, op=None, COUNT=parts.shape[0], BLOCK=_BLOCK)
