"""CPU backend of silu as ``torch.library`` operators; arithmetic in silu.cpp."""

from __future__ import annotations

from pathlib import Path

import torch

from rlk.kernels._native import NativeLibrary

LIBRARY = NativeLibrary("silu", Path(__file__).with_name("silu.cpp"))


@torch.library.custom_op("rlk::silu", mutates_args=(), device_types="cpu")
def silu(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    LIBRARY.call("silu_forward", x.contiguous(), y, x.numel())
    return y


@torch.library.custom_op("rlk::silu_backward", mutates_args=(), device_types="cpu")
def silu_backward(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    LIBRARY.call("silu_backward", x.contiguous(), dy.contiguous(), dx, x.numel(), op="silu.backward")
    return dx


@silu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@silu_backward.register_fake
def _(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _backward(ctx, dy):  # type: ignore[no-untyped-def]
    return torch.ops.rlk.silu_backward(*ctx.saved_tensors, dy)


silu.register_autograd(_backward, setup_context=_setup)
