"""CPU backend of swiglu as ``torch.library`` operators; arithmetic in swiglu.cpp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from rlk.kernels._native import NativeLibrary

LIBRARY = NativeLibrary("swiglu", Path(__file__).with_name("swiglu.cpp"))


@torch.library.custom_op("rlk::swiglu", mutates_args=(), device_types="cpu")
def swiglu(gate_up: torch.Tensor, shards: int) -> torch.Tensor:
    tokens, columns = gate_up.shape
    y = gate_up.new_empty(tokens, columns // 2)
    LIBRARY.call("swiglu_forward", gate_up.contiguous(), y, tokens, shards, columns // (2 * shards))
    return y


@torch.library.custom_op("rlk::swiglu_backward", mutates_args=(), device_types="cpu")
def swiglu_backward(gate_up: torch.Tensor, dy: torch.Tensor, shards: int) -> torch.Tensor:
    tokens, columns = gate_up.shape
    dx = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    width = columns // (2 * shards)
    LIBRARY.call("swiglu_backward", gate_up.contiguous(), dy.contiguous(), dx, tokens, shards, width, op="swiglu.backward")
    return dx


@swiglu.register_fake
def _(gate_up: torch.Tensor, shards: int) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


@swiglu_backward.register_fake
def _(gate_up: torch.Tensor, dy: torch.Tensor, shards: int) -> torch.Tensor:
    return torch.empty_like(gate_up, memory_format=torch.contiguous_format)


def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    gate_up, ctx.shards = inputs
    ctx.save_for_backward(gate_up)


def backward(gradient: Callable[..., torch.Tensor], ctx, dy):  # type: ignore[no-untyped-def]
    return gradient(*ctx.saved_tensors, dy, ctx.shards), None


swiglu.register_autograd(partial(backward, swiglu_backward), setup_context=setup)
