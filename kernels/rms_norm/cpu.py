"""CPU backend of rms_norm as ``torch.library`` operators; arithmetic in rms_norm.cpp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from rlk.kernels._native import NativeLibrary

LIBRARY = NativeLibrary("rms_norm", Path(__file__).with_name("rms_norm.cpp"))


@torch.library.custom_op("rlk::rms_norm", mutates_args=(), device_types="cpu")
def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    width = x.shape[-1]
    LIBRARY.call("rms_norm_forward", x, gamma.contiguous(), y, x.numel() // width, width, float(eps))
    return y


@rms_norm.register_fake
def _(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("rlk::rms_norm_backward", mutates_args=(), device_types="cpu")
def rms_norm_backward(x: torch.Tensor, gamma: torch.Tensor, dy: torch.Tensor, eps: float) -> torch.Tensor:
    x, dy = x.contiguous(), dy.contiguous()
    dx = torch.empty_like(x)
    width = x.shape[-1]
    LIBRARY.call("rms_norm_backward", x, gamma.contiguous(), dy, dx, x.numel() // width, width, float(eps), op="rms_norm.backward")
    return dx


@rms_norm_backward.register_fake
def _(x: torch.Tensor, gamma: torch.Tensor, dy: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, gamma, ctx.eps = inputs
    ctx.save_for_backward(x, gamma)


def backward(gradient: Callable[..., torch.Tensor], ctx, dy):  # type: ignore[no-untyped-def]
    x, gamma = ctx.saved_tensors
    return gradient(x, gamma, dy, ctx.eps), None, None


rms_norm.register_autograd(partial(backward, rms_norm_backward), setup_context=setup)


def gamma_roots(
    x: torch.Tensor, dy: torch.Tensor, eps: float, index: torch.Tensor, offsets: torch.Tensor, heads: int, shards: int, op: str
) -> torch.Tensor:
    """Gradient of gamma of every shard of heads, leaves joined, shards not: [shards, width] fp32."""
    width = x.shape[-1]
    out = x.new_empty(shards, width, dtype=torch.float32)
    LIBRARY.call(
        "rms_norm_gamma_grad", x.contiguous(), dy.contiguous(), index.contiguous(), offsets.contiguous(), out,
        offsets.numel() - 1, heads, shards, width, float(eps), op=op,
    )  # fmt: skip
    return out


def gamma_grad(x: torch.Tensor, dy: torch.Tensor, eps: float, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return gamma_roots(x, dy, eps, index, offsets, 1, 1, "rms_norm.gamma_grad")[0]
