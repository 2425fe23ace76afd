"""Triton backend of swiglu: silu(gate)·up in fp32, one rounding to bf16; one program per piece of a shard of a token."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from rlk.kernels import overlap
from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.numerics import silu, silu_slope
from rlk.kernels.direct import differentiable
from rlk.kernels.swiglu import cpu

SOURCE = TritonSource("swiglu")
_BLOCK = 512


@triton.jit
def _place(width, BLOCK: tl.constexpr):
    """Number of the (token, shard), and columns within the shard."""
    return tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def _forward(gate_up, y, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    piece, column = _place(width, BLOCK)
    gate = gate_up + piece * 2 * width + column
    g = tl.load(gate, mask=column < width, other=0.0).to(tl.float32)
    u = tl.load(gate + width, mask=column < width, other=0.0).to(tl.float32)
    tl.store(y + piece * width + column, (silu(g) * u).to(y.dtype.element_ty), mask=column < width)


@triton.jit
def _backward(gate_up, dy, dgate_up, width, BLOCK: tl.constexpr):
    piece, column = _place(width, BLOCK)
    gate = piece * 2 * width + column
    g = tl.load(gate_up + gate, mask=column < width, other=0.0).to(tl.float32)
    u = tl.load(gate_up + gate + width, mask=column < width, other=0.0).to(tl.float32)
    d = tl.load(dy + piece * width + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(dgate_up + gate, (d * u * silu_slope(g)).to(dgate_up.dtype.element_ty), mask=column < width)
    tl.store(dgate_up + gate + width, (d * silu(g)).to(dgate_up.dtype.element_ty), mask=column < width)


def _grid(tokens: int, shards: int, width: int) -> tuple[int, int]:
    return tokens * shards, triton.cdiv(width, _BLOCK)


@cpu.swiglu.register_kernel("cuda")
def forward(gate_up: torch.Tensor, shards: int) -> torch.Tensor:
    tokens, columns = gate_up.shape
    y, width = gate_up.new_empty(tokens, columns // 2), columns // (2 * shards)
    SOURCE.launch(
        _forward, _grid(tokens, shards, width), gate_up.contiguous(), y, width, op="swiglu", warps=2, BLOCK=_BLOCK, **overlap.constants()
    )
    return y


@cpu.swiglu_backward.register_kernel("cuda")
def backward(gate_up: torch.Tensor, dy: torch.Tensor, shards: int) -> torch.Tensor:
    tokens, columns = gate_up.shape
    dx, width = torch.empty_like(gate_up, memory_format=torch.contiguous_format), columns // (2 * shards)
    operands = gate_up.contiguous(), dy.contiguous(), dx
    SOURCE.launch(_backward, _grid(tokens, shards, width), *operands, width, op="swiglu.backward", warps=2, BLOCK=_BLOCK)
    return dx


swiglu = differentiable(forward, cpu.setup, partial(cpu.backward, backward))


def examples() -> None:
    """Calls for the ahead-of-time harness: the packed projection of Qwen3-8B in 8 shards."""
    gate_up = torch.empty(59, 24576, dtype=torch.bfloat16, device="meta")
    backward(gate_up, forward(gate_up, 8), 8)
