"""Triton backend of embedding: rows are copied; the weight gradient adds per id in leaf order. The same bytes as the CPU backend.

An id outside the vocabulary raises when it is seen on the host; in a replayed graph, where nothing can be raised, its row becomes NaN.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.numerics import pair_tree
from rlk.kernels.checked import check_once
from rlk.kernels.direct import differentiable
from rlk.kernels.embedding import cpu

SOURCE = TritonSource("embedding")
_BLOCK = 1024
_GRAD_BLOCK = 256


@triton.jit
def _copy(ids, weight, y, vocab, width, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids + token + tl.arange(0, 1))
    known = (column < width) & (row >= 0) & (row < vocab)
    tl.store(y + token * width + column, tl.load(weight + row * width + column, mask=known, other=float("nan")), mask=column < width)


@triton.jit
def _add_runs(
    keys, order, ends, index, offsets, dy, dweight, rows, width,
    LEAVES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The program at the first of a run of equal keys adds the run's rows, leaf by leaf in leaf order, and joins the leaves."""
    start = tl.program_id(0)
    key = tl.load(keys + start)
    before = tl.load(keys + start - 1, mask=start > 0, other=-1)
    if (key != before) & (key >= 0) & (key < rows):
        column, leaf = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, LEAVES)
        edge = tl.load(offsets + 1 + leaf)
        total = tl.zeros((LEAVES, BLOCK), tl.float32)
        for at in range(start, tl.load(ends + start)):
            position = tl.load(order + at)
            token = tl.load(index + position)
            value = tl.load(dy + token * width + column, mask=column < width, other=0.0).to(tl.float32)
            own = leaf == tl.sum((edge <= position).to(tl.int32))
            total = tl.where(own[:, None], total + value[None, :], total)
        tl.store(dweight + key * width + column, pair_tree(total), mask=column < width)


def copy(ids: torch.Tensor, weight: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """weight[ids[t]] for every token."""
    tokens, width = ids.numel(), weight.shape[1]
    y = weight.new_empty(tokens, width)
    grid = (tokens, triton.cdiv(width, _BLOCK))
    SOURCE.launch(_copy, grid, ids.contiguous(), weight.contiguous(), y, vocab_size, width, op="embedding", BLOCK=_BLOCK)
    return y


@cpu.embedding.register_kernel("cuda")
def run_forward(ids: torch.Tensor, weight: torch.Tensor, vocab_size: int) -> torch.Tensor:
    check_once(ids, ("embedding", vocab_size), lambda: cpu.check_ids(ids, vocab_size))
    return copy(ids, weight, vocab_size)


embedding = differentiable(run_forward, cpu.setup, cpu.backward)


def add_runs(ids: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Gradient of ``rows`` weight rows, [rows, H] fp32. Positions are sorted by id, stably, so that each id keeps its leaf order."""
    dweight = dy.new_zeros(rows, dy.shape[1], dtype=torch.float32)
    if not ids.numel():
        return dweight
    keys, order = torch.sort(torch.where(index < 0, rows, ids[index.clamp(min=0)]), stable=True)
    ends = torch.searchsorted(keys, keys, right=True)
    width = dy.shape[1]
    grid = (keys.numel(), triton.cdiv(width, _GRAD_BLOCK))
    operands = keys, order, ends, index.contiguous(), offsets.contiguous(), dy.contiguous(), dweight
    SOURCE.launch(
        _add_runs, grid, *operands, rows, width, op="embedding.weight_grad", warps=2, LEAVES=offsets.numel() - 1, BLOCK=_GRAD_BLOCK
    )  # fmt: skip
    return dweight


def weight_grad(ids: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
    check_once(ids, ("embedding.weight_grad", rows, index), lambda: cpu.check_ids(ids, rows, index[index >= 0]))
    return add_runs(ids, dy, index, offsets, rows)


def examples() -> None:
    """Calls for the ahead-of-time harness: the table of Qwen3-8B, and its gradient over 8 leaves."""
    with torch.device("meta"):
        ids, dy = torch.empty(59, dtype=torch.int64), torch.empty(59, 4096, dtype=torch.bfloat16)
        copy(ids, torch.empty(152576, 4096, dtype=torch.bfloat16), 151936)
        add_runs(ids, dy, torch.empty(512, dtype=torch.int64), torch.empty(9, dtype=torch.int64), 152576)
