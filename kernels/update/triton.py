"""Triton backend of update: one pass over memory for each function, every operation IEEE and in the order of the CPU backend."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk.contract.update import AdamStep
from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.numerics import row_tree

SOURCE = TritonSource("update")
_BLOCK = 1024


@triton.jit
def _adam(
    weight, master, m, v, gradient, size, lr, beta1, one_minus_beta1, beta2, one_minus_beta2, correction1, correction2, eps, weight_decay,
    scale, SCALES: tl.constexpr, DECAYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks,)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    g = tl.load(gradient + at, mask=inside, other=0.0)
    if SCALES:
        g = g * scale
    new_m = tl.load(m + at, mask=inside, other=0.0) * beta1 + one_minus_beta1 * g
    new_v = tl.load(v + at, mask=inside, other=0.0) * beta2 + one_minus_beta2 * g * g
    w = tl.load(master + at, mask=inside, other=0.0)
    change = tl.div_rn(tl.div_rn(new_m, correction1), tl.sqrt_rn(tl.div_rn(new_v, correction2)) + eps)
    if DECAYS:
        change = change + weight_decay * w
    w = w - change * lr
    tl.store(m + at, new_m, mask=inside)
    tl.store(v + at, new_v, mask=inside)
    tl.store(master + at, w, mask=inside)
    tl.store(weight + at, w.to(weight.dtype.element_ty), mask=inside)


@triton.jit
def _squares(x, sums, size, width, row_stride, shard_stride, blocks, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """sums[shard, block]; element k of a shard lies in column k % width of row k // width, or at k (WHOLE). Grid: (blocks, shards).

    One warp has a block: its tree needs no shared memory. Only the block's first element is divided in 64 bits.
    """
    shard, block = tl.program_id(1).to(tl.int64), tl.program_id(0)
    first, step = block.to(tl.int64) * BLOCK, tl.arange(0, BLOCK)[None, :]
    if WHOLE:
        at = first + step
    else:
        column = (first % width).to(tl.int32) + step
        at = (first // width + column // width) * row_stride + column % width
    value = tl.load(x + shard * shard_stride + at, mask=first + step < size, other=0.0).to(tl.float64)
    tl.store(sums + shard * blocks + block + tl.arange(0, 1), row_tree(value * value))


def adam(
    weight: torch.Tensor, master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, step: AdamStep, scale: float,
    decays: bool,
) -> None:  # fmt: skip
    SOURCE.launch(
        _adam, (triton.cdiv(master.numel(), _BLOCK),), weight, master, m, v, gradient, master.numel(), step.lr, step.beta1,
        step.one_minus_beta1, step.beta2, step.one_minus_beta2, step.correction1, step.correction2, step.eps, step.weight_decay, scale,
        op="update.adam", warps=4, SCALES=scale != 1, DECAYS=decays, BLOCK=_BLOCK,
    )  # fmt: skip


def block_squares(shards: torch.Tensor, block: int) -> torch.Tensor:
    count, size = len(shards), shards[0].numel()
    whole = shards[0].is_contiguous()
    width, stride = (0, 0) if whole else (shards.shape[2], shards.stride(1))
    blocks = triton.cdiv(size, block)
    sums = shards.new_empty(count, blocks, dtype=torch.float64)
    SOURCE.launch(
        _squares, (blocks, count), shards, sums, size, width, stride, shards.stride(0), blocks, op="update.block_squares", warps=1,
        BLOCK=block, WHOLE=whole,
    )  # fmt: skip
    return sums


def examples() -> None:
    """Calls for the ahead-of-time harness: o_proj of Qwen3-8B in shards of its columns, and a norm's gain."""
    with torch.device("meta"):
        step = AdamStep(1e-6, 0.9, 0.1, 0.98, 0.02, 0.1, 0.02, 1e-8, 0.1)
        for shape in ((4096, 4096), (4096,)):
            master, m, v, gradient = (torch.empty(shape) for _ in range(4))
            for scale in (1.0, 0.5):
                adam(torch.empty(shape, dtype=torch.bfloat16), master, m, v, gradient, step, scale, len(shape) == 2)
        block_squares(torch.empty(4096, 4096).unflatten(1, (8, -1)).movedim(1, 0), 1024)
        block_squares(torch.empty(1, 4096), 1024)
