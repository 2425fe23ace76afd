"""Triton backend of update: one pass over the memory of all tensors, every operation IEEE and in the order of the CPU backend.

A kernel finds its tensors by a table of their addresses.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rlk.contract.update import AdamStep
from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.numerics import column_tree, row_tree
from rlk.kernels.update.cpu import AdamTensors

SOURCE = TritonSource("update")
_BLOCK = 1024
_WIDTH = 1024
"""Sums of a shard to which the first of two kernels folds its block sums."""
_TILE = 4096
"""Sums that a program of it holds."""
_ALIGN = 16


@triton.jit
def _address(row, column: tl.constexpr, dtype: tl.constexpr, ALIGN: tl.constexpr):
    return tl.multiple_of(tl.load(row + column).to(tl.pointer_type(dtype)), ALIGN)


@triton.jit
def _adam(
    table, owners, lr, beta1, one_minus_beta1, beta2, one_minus_beta2, correction1, correction2, eps, weight_decay, scale,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns of the table: elements; addresses of weight, master, m, v and gradient; whether the tensor decays; first block.
    Grid: (blocks,)."""
    block = tl.program_id(0)
    row = table + tl.load(owners + block) * 8
    weight, master, m = _address(row, 1, tl.bfloat16, ALIGN), _address(row, 2, tl.float32, ALIGN), _address(row, 3, tl.float32, ALIGN)
    v, gradient = _address(row, 4, tl.float32, ALIGN), _address(row, 5, tl.float32, ALIGN)
    at = (block - tl.load(row + 7)) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tl.multiple_of(tl.load(row), ALIGN)
    decays = tl.load(row + 6) != 0
    g = tl.load(gradient + at, mask=inside, other=0.0) * scale
    new_m = tl.load(m + at, mask=inside, other=0.0) * beta1 + one_minus_beta1 * g
    new_v = tl.load(v + at, mask=inside, other=0.0) * beta2 + one_minus_beta2 * g * g
    w = tl.load(master + at, mask=inside, other=0.0)
    change = tl.div_rn(tl.div_rn(new_m, correction1), tl.sqrt_rn(tl.div_rn(new_v, correction2)) + eps)
    w = w - tl.where(decays, change + weight_decay * w, change) * lr
    tl.store(m + at, new_m, mask=inside)
    tl.store(v + at, new_v, mask=inside)
    tl.store(master + at, w, mask=inside)
    tl.store(weight + at, w.to(tl.bfloat16), mask=inside)


@triton.jit
def _squares(table, owners, sums, ALIGN: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of the table: elements and address of a shard; columns and stride of its rows; whether there are gaps between them; first
    block. Grid: (blocks,).

    One warp has a block: its tree needs no shared memory. Only the block's first element is divided in 64 bits.
    """
    block = tl.program_id(0)
    row = table + tl.load(owners + block) * 6
    x = _address(row, 1, tl.float32, ALIGN)
    first, step = (block - tl.load(row + 5)) * BLOCK, tl.arange(0, BLOCK)[None, :]
    at = first + step
    inside = at < tl.multiple_of(tl.load(row), ALIGN)
    if tl.load(row + 4) != 0:
        width, stride = tl.multiple_of(tl.load(row + 2).to(tl.int32), ALIGN), tl.multiple_of(tl.load(row + 3), ALIGN)
        column = (first % width).to(tl.int32) + step
        at = (first // width + column // width) * stride + column % width
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float64)
    tl.store(sums + block + tl.arange(0, 1), row_tree(value * value))


@triton.jit
def _fold(sums, bounds, folded, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """folded[shard, column]: row tree over the block sums column, column + WIDTH, … of a shard, sums[bounds[shard]:bounds[shard + 1]].
    Grid: (shards, WIDTH / COLUMNS). No sum is -0, so +0 behind the last one changes none.
    """
    shard, column = tl.program_id(0), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.load(bounds + shard) + tl.arange(0, ROWS)[:, None] * WIDTH + column[None, :]
    value = tl.load(sums + at, mask=at < tl.load(bounds + shard + 1), other=0.0)
    tl.store(folded + shard * WIDTH + column, column_tree(value))


@triton.jit
def _join(folded, out, WIDTH: tl.constexpr):
    """Grid: (shards,)."""
    value = tl.load(folded + tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)[None, :])
    tl.store(out + tl.program_id(0) + tl.arange(0, 1), row_tree(value))


def adam(parameters: Sequence[AdamTensors], decays: Sequence[bool]) -> Callable[[AdamStep, float], None]:
    rows = [(held.weight.numel(), *[tensor.data_ptr() for tensor in held]) for held in parameters]
    made = _tables([tensor for held in parameters for tensor in held], rows, decays, _BLOCK)

    def update(step: AdamStep, scale: float) -> None:
        SOURCE.launch(
            _adam, (len(made.owners),), made.table, made.owners, step.lr, step.beta1, step.one_minus_beta1, step.beta2,
            step.one_minus_beta2, step.correction1, step.correction2, step.eps, step.weight_decay, scale, op="update.adam", warps=4,
            ALIGN=made.align, BLOCK=_BLOCK,
        )  # fmt: skip

    return update


def square_sums(tensors: Sequence[torch.Tensor], block: int) -> Callable[[], torch.Tensor]:
    rows, gaps = [], []
    for shards in tensors:
        (count, *shape), (stride, *strides), address = shards.shape, shards.stride(), shards.data_ptr()
        gap = len(shape) == 2 and shape[0] > 1 and strides[0] != shape[1]
        lines = (shape[1], strides[0]) if gap else (0, 0)
        rows += [(math.prod(shape), address + at * stride * shards.element_size(), *lines) for at in range(count)]
        gaps += [gap] * count
    made = _tables(tensors, rows, gaps, block)
    deep = triton.next_power_of_2(triton.cdiv(made.longest, _WIDTH))
    columns, sizes = max(1, min(_WIDTH, _TILE // deep)), (len(made.owners), len(rows) * _WIDTH, len(rows))

    def total() -> torch.Tensor:
        sums, folded, out = (made.table.new_empty(size, dtype=torch.float64) for size in sizes)
        SOURCE.launch(
            _squares, (len(made.owners),), made.table, made.owners, sums, op="update.square_sums", warps=1, ALIGN=made.align, BLOCK=block
        )
        SOURCE.launch(
            _fold, (len(rows), _WIDTH // columns), sums, made.bounds, folded, op=None, warps=4, ROWS=deep, COLUMNS=columns, WIDTH=_WIDTH
        )
        SOURCE.launch(_join, (len(rows),), folded, out, op=None, warps=1, WIDTH=_WIDTH)
        return out

    return total


class _Tables(NamedTuple):
    """What kernels find blocks of several tensors by.

    held: the tensors, which keep their memory for as long. table: int64 [rows, …]: what is known of a row, its flag, its first block.
    owners: int32, of each block its row. bounds: int64 [rows + 1], first block of each row, and of one more. longest: blocks of the longest
    row. align: a divisor of all numbers of the rows.
    """

    held: Sequence[torch.Tensor]
    table: torch.Tensor
    owners: torch.Tensor
    bounds: torch.Tensor
    longest: int
    align: int


def _tables(held: Sequence[torch.Tensor], rows: Sequence[tuple[int, ...]], flags: Sequence[bool], block: int) -> _Tables:
    """The tables of rows that begin with their number of elements."""
    counts = [triton.cdiv(row[0], block) for row in rows]
    bounds = list(accumulate(counts, initial=0))
    table = [(*row, int(flag), first) for row, flag, first in zip(rows, flags, bounds[:-1], strict=True)]
    owners = torch.arange(len(rows), dtype=torch.int32, device="cpu").repeat_interleave(torch.tensor(counts, device="cpu"))
    align = _ALIGN if all(value % _ALIGN == 0 for row in rows for value in row) else 1
    device = held[0].device
    return _Tables(
        held, torch.tensor(table, device=device), owners.to(device), torch.tensor(bounds, device=device), longest=max(counts), align=align
    )


def examples() -> None:
    """Calls for the ahead-of-time harness: o_proj of Qwen3-8B in shards of its columns and a norm's gain, and odd sizes."""
    with torch.device("meta"):
        step = AdamStep(1e-6, 0.9, 0.1, 0.98, 0.02, 0.1, 0.02, 1e-8, 0.1)
        for shapes in (((4096, 4096), (4096,)), ((37, 5),)):
            held = [AdamTensors(torch.empty(shape, dtype=torch.bfloat16), *[torch.empty(shape)] * 4) for shape in shapes]
            adam(held, [len(shape) == 2 for shape in shapes])(step, 1.0)
        vocabulary, o_proj = torch.empty(152576, 4096).unflatten(0, (8, -1)), torch.empty(4096, 4096).unflatten(1, (8, -1)).movedim(1, 0)
        square_sums([vocabulary, o_proj], 1024)()
        square_sums([torch.empty(1, 4095)], 1024)()
