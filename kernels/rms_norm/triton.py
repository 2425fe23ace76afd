"""Triton backend of rms_norm, and the arithmetic of qk_norm: one program holds whole rows, sums are row trees.

Every step is IEEE and in the CPU backend's order, so both backends give the same bytes. On Hopper kernels in CUDA C++ (``sm90``) normalise
heads and give the gradients of wide rows, with these bytes.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.fold import fold_leaves
from rlk.kernels._triton.numerics import bf16, column_tree, reciprocal_root, row_tree
from rlk.kernels.direct import differentiable
from rlk.kernels.rms_norm import cpu, sm90

SOURCE = TritonSource("rms_norm")

_ELEMENTS = 2048  # of one program's rows, at least
_GROUP = tl.constexpr(16)


@triton.jit
def _addresses(first, rows, heads, token_stride, head_stride, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Row r is head r % heads of token r // heads. Returns ([ROWS], [ROWS, BLOCK]) row numbers and offsets, and which exist."""
    row = first.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    offset = (row // heads) * token_stride + (row % heads) * head_stride
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    return row, offset[:, None] + column[None, :], inside


@triton.jit
def _rstd(x, eps, WIDTH: tl.constexpr):
    return reciprocal_root(tl.div_rn(row_tree(x * x), WIDTH * 1.0), eps)


@triton.jit
def _forward(
    x, gamma, y, rows, heads, token_stride, head_stride, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, offset, inside = _addresses(tl.program_id(0), rows, heads, token_stride, head_stride, WIDTH, ROWS, BLOCK)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(gamma + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    normed = bf16(value * _rstd(value, eps, WIDTH)[:, None])
    to = y + row[:, None] * WIDTH + column[None, :]
    tl.store(to, (normed * weight[None, :]).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    x, gamma, dy, dx, rows, heads, token_stride, head_stride, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, offset, inside = _addresses(tl.program_id(0), rows, heads, token_stride, head_stride, WIDTH, ROWS, BLOCK)
    column = tl.arange(0, BLOCK)
    packed = row[:, None] * WIDTH + column[None, :]
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(dy + packed, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(gamma + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    rstd = _rstd(value, eps, WIDTH)[:, None]
    x_hat = value * rstd
    scaled = weight[None, :] * grad
    mean = tl.div_rn(row_tree(scaled * x_hat), WIDTH * 1.0)[:, None]
    tl.store(dx + packed, (rstd * (scaled - x_hat * mean)).to(dx.dtype.element_ty), mask=inside)


@triton.jit
def _row_rstd(x, rstd, rows, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row, offset, inside = _addresses(tl.program_id(0), rows, 1, WIDTH, 0, WIDTH, ROWS, BLOCK)
    value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    tl.store(rstd + row, _rstd(value, eps, WIDTH), mask=row < rows)


@triton.jit
def _gamma_leaves(x, dy, rstd, index, offsets, parts, heads, each, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """parts[leaf, shard]: from +0, the leaf's tokens and then the shard's ``each`` heads ascending, in groups of 16."""
    leaf, shard = tl.program_id(1), tl.program_id(2)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first, last = tl.load(offsets + leaf) * each, tl.load(offsets + leaf + 1) * each
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(first, last, _GROUP):
        at = start + tl.arange(0, _GROUP)
        token = tl.load(index + at // each, mask=at < last, other=-1)
        row = token * heads + shard * each + at % each
        inside = (token >= 0)[:, None] & (column < WIDTH)[None, :]
        offset = row[:, None] * WIDTH + column[None, :]
        value = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + offset, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=token >= 0, other=0.0)
        total += column_tree(tl.where(inside, grad * bf16(value * scale[:, None]), 0.0))
    to = parts + (leaf * tl.num_programs(2) + shard) * WIDTH + column
    tl.store(to, total, mask=column < WIDTH)


def _shape(width: int) -> dict[str, int]:
    """Rows and columns of one program, and its warps, for rows of ``width``."""
    block = triton.next_power_of_2(width)
    rows = max(1, _ELEMENTS // block)
    elements = 2048 if rows == 1 else 1024  # of one warp: every warp repeats the last levels of a tree that crosses warps
    return {"WIDTH": width, "ROWS": rows, "BLOCK": block, "warps": min(16, max(1, rows * block // elements))}


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int, int]:
    """x with its rows, heads per token and strides. Heads of a packed tensor are read in place."""
    if x.ndim == 3 and x.stride(2) == 1:
        return x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)
    x = x.contiguous()
    return x, x.numel() // x.shape[-1], 1, x.shape[-1], 0


def normalise(op: str, x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """y of every row of x."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, rows, heads, token_stride, head_stride = _rows(x)
    layout, gamma = (rows, heads, token_stride, head_stride), gamma.contiguous()
    if sm90.takes_heads(x, gamma, token_stride, head_stride):
        sm90.normalise_heads(op, x, gamma, y, *layout, eps)
        return y
    shape = _shape(x.shape[-1])
    SOURCE.launch(_forward, (triton.cdiv(rows, shape["ROWS"]),), x, gamma, y, *layout, eps, op=op, **shape)
    return y


def gradient(op: str, x: torch.Tensor, gamma: torch.Tensor, dy: torch.Tensor, eps: float) -> torch.Tensor:
    """dx of every row of x."""
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, rows, *layout = _rows(x)
    gamma, dy = gamma.contiguous(), dy.contiguous()
    if x.is_contiguous() and sm90.takes(x, gamma, dy):
        sm90.gradient(op, x, gamma, dy, dx, eps)
        return dx
    shape = _shape(x.shape[-1])
    grid = (triton.cdiv(rows, shape["ROWS"]),)
    SOURCE.launch(_backward, grid, x, gamma, dy, dx, rows, *layout, eps, op=op, **shape)
    return dx


def gamma_roots(
    x: torch.Tensor, dy: torch.Tensor, eps: float, index: torch.Tensor, offsets: torch.Tensor, heads: int, shards: int, op: str
) -> torch.Tensor:
    """Gradient of gamma of every shard of heads, leaves joined, shards not: [shards, width] fp32."""
    x, dy, width = x.contiguous(), dy.contiguous(), x.shape[-1]
    index, offsets = index.contiguous(), offsets.contiguous()
    rows, leaves = x.numel() // width, offsets.numel() - 1
    out = x.new_empty(shards, width, dtype=torch.float32)
    if heads == 1 and sm90.takes(x, dy):
        fold_leaves(SOURCE, sm90.gain_parts(op, x, dy, eps, index, offsets), out)
        return out
    rstd = x.new_empty(rows, dtype=torch.float32)
    parts = x.new_empty(leaves, shards, width, dtype=torch.float32)
    shape = _shape(width)
    SOURCE.launch(_row_rstd, (triton.cdiv(rows, shape["ROWS"]),), x, rstd, rows, eps, op=None, **shape)
    block = min(64, triton.next_power_of_2(width))
    grid = (triton.cdiv(width, block), leaves, shards)
    SOURCE.launch(
        _gamma_leaves, grid, x, dy, rstd, index, offsets, parts, heads, heads // shards,
        op=op, warps=1, stages=3, WIDTH=width, BLOCK=block,
    )  # fmt: skip
    fold_leaves(SOURCE, parts, out)
    return out


@cpu.rms_norm.register_kernel("cuda")
def run_forward(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    return normalise("rms_norm", x, gamma, eps)


@cpu.rms_norm_backward.register_kernel("cuda")
def run_backward(x: torch.Tensor, gamma: torch.Tensor, dy: torch.Tensor, eps: float) -> torch.Tensor:
    return gradient("rms_norm.backward", x, gamma, dy, eps)


rms_norm = differentiable(run_forward, cpu.setup, partial(cpu.backward, run_backward))


def gamma_grad(x: torch.Tensor, dy: torch.Tensor, eps: float, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return gamma_roots(x, dy, eps, index, offsets, 1, 1, "rms_norm.gamma_grad")[0]


def examples() -> None:
    """Calls for the ahead-of-time harness: hidden rows of Qwen3-8B, a width that is no power of two, and their gradients."""
    with torch.device("meta"):
        for width in (4096, 96):
            x, gamma = torch.empty(59, width, dtype=torch.bfloat16), torch.empty(width, dtype=torch.bfloat16)
            normalise("rms_norm", x, gamma, 1e-6)
            gradient("rms_norm.backward", x, gamma, x, 1e-6)
        index, offsets = torch.empty(512, dtype=torch.int64), torch.empty(9, dtype=torch.int64)
        gamma_grad(torch.empty(59, 4096, dtype=torch.bfloat16), torch.empty(59, 4096, dtype=torch.bfloat16), 1e-6, index, offsets)
