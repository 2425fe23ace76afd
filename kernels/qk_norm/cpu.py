"""CPU backend of qk_norm as ``torch.library`` operators; the arithmetic is rms_norm's, over heads."""

from __future__ import annotations

from functools import partial

import torch

from rlk.kernels.rms_norm.cpu import LIBRARY, backward, gamma_roots, setup


@torch.library.custom_op("rlk::qk_norm", mutates_args=(), device_types="cpu")
def qk_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, heads, dim = x.shape
    LIBRARY.call("rms_norm_forward", x.contiguous(), gamma.contiguous(), y, tokens * heads, dim, float(eps), op="qk_norm")
    return y


@torch.library.custom_op("rlk::qk_norm_backward", mutates_args=(), device_types="cpu")
def qk_norm_backward(x: torch.Tensor, gamma: torch.Tensor, dy: torch.Tensor, eps: float) -> torch.Tensor:
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    tokens, heads, dim = x.shape
    arguments = (x.contiguous(), gamma.contiguous(), dy.contiguous(), dx, tokens * heads, dim, float(eps))
    LIBRARY.call("rms_norm_backward", *arguments, op="qk_norm.backward")
    return dx


@qk_norm.register_fake
def _(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@qk_norm_backward.register_fake
def _(x: torch.Tensor, gamma: torch.Tensor, dy: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


qk_norm.register_autograd(partial(backward, qk_norm_backward), setup_context=setup)


def shard_gamma_grads(
    x: torch.Tensor, dy: torch.Tensor, eps: float, index: torch.Tensor, offsets: torch.Tensor, shards: int
) -> torch.Tensor:
    return gamma_roots(x, dy, eps, index, offsets, x.shape[1], shards, "qk_norm.gamma_grad")
