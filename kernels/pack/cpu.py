"""CPU backend of pack and unpack as ``torch.library`` operators; row copies in pack.cpp."""

from __future__ import annotations

from pathlib import Path

import torch

from rlk.kernels._native import NativeLibrary

LIBRARY = NativeLibrary("pack", Path(__file__).with_name("pack.cpp"))


def true_rows(mask: torch.Tensor) -> torch.Tensor:
    """Row numbers b·S + s of the true places, ascending."""
    return mask.flatten().nonzero()[:, 0]


def require_fits(x: torch.Tensor, rows: torch.Tensor) -> None:
    """Raise ValueError unless x has one row per true place."""
    if rows.numel() != x.shape[0]:
        raise ValueError(f"unpack: {x.shape[0]} rows for {rows.numel()} true places of the mask: use the mask that packed them")


def _row_bytes(x: torch.Tensor, dims: int) -> int:
    return x.shape[dims:].numel() * x.element_size()


@torch.library.custom_op("rlk::pack", mutates_args=(), device_types="cpu")
def pack(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    rows = true_rows(mask)
    y = x.new_empty(rows.numel(), *x.shape[2:])
    LIBRARY.call("pack_rows", x.contiguous(), rows, y, rows.numel(), _row_bytes(x, 2))
    return y


@pack.register_fake
def _(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size(), *x.shape[2:])


@torch.library.custom_op("rlk::unpack", mutates_args=(), device_types="cpu")
def unpack(x: torch.Tensor, mask: torch.Tensor, fill: torch.types.Number) -> torch.Tensor:
    rows = true_rows(mask)
    require_fits(x, rows)
    y = x.new_full((*mask.shape, *x.shape[1:]), fill)
    LIBRARY.call("unpack_rows", x.contiguous(), rows, y, rows.numel(), _row_bytes(x, 1), op="pack.unpack")
    return y


@unpack.register_fake
def _(x: torch.Tensor, mask: torch.Tensor, fill: torch.types.Number) -> torch.Tensor:
    return x.new_empty(*mask.shape, *x.shape[1:])


def _keep_mask(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[1])


def _pack_backward(ctx, dy):  # type: ignore[no-untyped-def]
    return torch.ops.rlk.unpack(dy, *ctx.saved_tensors, 0), None


def _unpack_backward(ctx, dy):  # type: ignore[no-untyped-def]
    return torch.ops.rlk.pack(dy, *ctx.saved_tensors), None, None


pack.register_autograd(_pack_backward, setup_context=_keep_mask)
unpack.register_autograd(_unpack_backward, setup_context=_keep_mask)
