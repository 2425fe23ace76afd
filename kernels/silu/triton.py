"""Triton backend of silu: element by element, one rounding to bf16."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.numerics import silu as silu_of
from rlk.kernels._triton.numerics import silu_slope
from rlk.kernels.silu.cpu import silu, silu_backward

SOURCE = TritonSource("silu")
_BLOCK = 1024


@triton.jit
def _forward(x, y, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(y + at, silu_of(value).to(y.dtype.element_ty), mask=at < size)


@triton.jit
def _backward(x, dy, dx, size, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)
    grad = tl.load(dy + at, mask=at < size, other=0.0).to(tl.float32)
    tl.store(dx + at, (grad * silu_slope(value)).to(dx.dtype.element_ty), mask=at < size)


@silu.register_kernel("cuda")
def forward(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    SOURCE.launch(_forward, (triton.cdiv(x.numel(), _BLOCK),), x.contiguous(), y, x.numel(), op="silu", BLOCK=_BLOCK)
    return y


@silu_backward.register_kernel("cuda")
def backward(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    SOURCE.launch(_backward, grid, x.contiguous(), dy.contiguous(), dx, x.numel(), op="silu.backward", BLOCK=_BLOCK)
    return dx


def examples() -> None:
    """Calls for the ahead-of-time harness."""
    x = torch.empty(59, 12288, dtype=torch.bfloat16, device="meta")
    forward(x)
    backward(x, x)
