"""Triton backend of pack and unpack: exact copies of rows as words of the widest size that divides them.

How many rows there are depends on the mask's values, which the host must read: once per mask.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk.kernels._triton import TritonSource
from rlk.kernels.checked import remembered
from rlk.kernels.pack.cpu import pack, require_fits, true_rows, unpack

SOURCE = TritonSource("pack")
_BLOCK = 1024
_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


@triton.jit
def _copy(source, target, rows, width, INTO: tl.constexpr, BLOCK: tl.constexpr):
    """target[rows[i]] = source[i] if INTO, else target[i] = source[rows[i]]."""
    i, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + i)
    read, write = i if INTO else row, row if INTO else i
    tl.store(target + write * width + column, tl.load(source + read * width + column, mask=column < width), mask=column < width)


def _words(x: torch.Tensor, lines: int) -> torch.Tensor:
    """The bytes of contiguous x as [lines, words]."""
    line = x.numel() // max(lines, 1) * x.element_size()
    word = next(w for w in _WORDS if line % w.itemsize == 0 and x.storage_offset() * x.element_size() % w.itemsize == 0)
    return x.reshape(-1).view(torch.uint8).view(word).view(lines, -1)


def copy_rows(op: str, source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor, into: bool) -> None:
    """Copy rows[i] of ``source`` [lines, …] to row i of ``target``, or row i to rows[i] if ``into``; both contiguous."""
    if not rows.numel() or not target.numel():
        return
    lines = _words(source, source.shape[0]), _words(target, target.shape[0])
    width = min(line.shape[1] for line in lines)
    assert lines[0].dtype == lines[1].dtype
    SOURCE.launch(_copy, (rows.numel(), triton.cdiv(width, _BLOCK)), *lines, rows, width, op=op, INTO=into, BLOCK=_BLOCK)


@pack.register_kernel("cuda")
def _(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = remembered(mask, "rows", lambda: true_rows(mask))
    y = x.new_empty(rows.numel(), *x.shape[2:])
    copy_rows("pack", x.contiguous().flatten(0, 1), y, rows, into=False)
    return y


@unpack.register_kernel("cuda")
def _(x: torch.Tensor, mask: torch.Tensor, fill: torch.types.Number) -> torch.Tensor:
    rows = remembered(mask, "rows", lambda: true_rows(mask))
    require_fits(x, rows)
    y = x.new_full((*mask.shape, *x.shape[1:]), fill)
    copy_rows("pack.unpack", x.contiguous(), y.flatten(0, 1), rows, into=True)
    return y


def examples() -> None:
    """Calls for the ahead-of-time harness: hidden rows of Qwen3-8B."""
    with torch.device("meta"):
        padded, packed = torch.empty(80, 4096, dtype=torch.bfloat16), torch.empty(59, 4096, dtype=torch.bfloat16)
        rows = torch.empty(59, dtype=torch.int64)
        copy_rows("pack", padded, packed, rows, into=False)
        copy_rows("pack.unpack", packed, padded, rows, into=True)
