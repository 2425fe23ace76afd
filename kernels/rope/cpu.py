"""CPU backend of rope as ``torch.library`` operators; arithmetic in rope.cpp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from rlk.kernels._native import NativeLibrary

LIBRARY = NativeLibrary("rope", Path(__file__).with_name("rope.cpp"))


def build_table(inv_freq: torch.Tensor, max_positions: int) -> torch.Tensor:
    table = inv_freq.new_empty(2, max_positions, inv_freq.numel(), dtype=torch.float32)
    LIBRARY.call("rope_table", inv_freq, table, max_positions, inv_freq.numel(), op="rope.table")
    return table


def check_positions(positions: torch.Tensor, length: int) -> None:
    """Raise IndexError for the first position outside a table of ``length`` positions."""
    outside = ((positions < 0) | (positions >= length)).nonzero()
    if outside.numel():
        row = int(outside[0])
        raise IndexError(
            f"rope: position {int(positions[row])} of token {row} is outside the table of {length} positions: build a longer table"
        )


def _rotate(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, inverse: bool) -> torch.Tensor:
    length = table.shape[1]
    check_positions(positions, length)
    tokens, heads, dim = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    op = "rope.backward" if inverse else "rope"
    LIBRARY.call(
        "rope_apply", x.contiguous(), positions.contiguous(), table.contiguous(), y, tokens, heads, dim // 2, length, int(inverse), op=op
    )  # fmt: skip
    return y


@torch.library.custom_op("rlk::rope", mutates_args=(), device_types="cpu")
def rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return _rotate(x, positions, table, inverse=False)


@torch.library.custom_op("rlk::rope_backward", mutates_args=(), device_types="cpu")
def rope_backward(dy: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return _rotate(dy, positions, table, inverse=True)


@rope.register_fake
@rope_backward.register_fake
def _(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, positions, table = inputs
    ctx.save_for_backward(positions, table)


def backward(gradient: Callable[..., torch.Tensor], ctx, dy):  # type: ignore[no-untyped-def]
    return gradient(dy, *ctx.saved_tensors), None, None


rope.register_autograd(partial(backward, rope_backward), setup_context=setup)
