"""Triton backend of qk_norm; the arithmetic is rms_norm's, over heads."""

from __future__ import annotations

from functools import partial

import torch

from rlk.kernels.direct import differentiable
from rlk.kernels.qk_norm import cpu
from rlk.kernels.rms_norm.cpu import backward, setup
from rlk.kernels.rms_norm.triton import gamma_roots, gradient, normalise


@cpu.qk_norm.register_kernel("cuda")
def run_forward(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    return normalise("qk_norm", x, gamma, eps)


@cpu.qk_norm_backward.register_kernel("cuda")
def run_backward(x: torch.Tensor, gamma: torch.Tensor, dy: torch.Tensor, eps: float) -> torch.Tensor:
    return gradient("qk_norm.backward", x, gamma, dy, eps)


qk_norm = differentiable(run_forward, setup, partial(backward, run_backward))


def shard_gamma_grads(
    x: torch.Tensor, dy: torch.Tensor, eps: float, index: torch.Tensor, offsets: torch.Tensor, shards: int
) -> torch.Tensor:
    return gamma_roots(x, dy, eps, index, offsets, x.shape[1], shards, "qk_norm.gamma_grad")


def examples() -> None:
    """Calls for the ahead-of-time harness: query heads of Qwen3-8B, read in place from the packed projection, and their gradients."""
    with torch.device("meta"):
        packed, gamma = torch.empty(59, 6144, dtype=torch.bfloat16), torch.empty(128, dtype=torch.bfloat16)
        heads = packed[:, :4096].unflatten(1, (32, 128))
        normalise("qk_norm", heads, gamma, 1e-6)
        gradient("qk_norm.backward", heads, gamma, heads, 1e-6)
        index, offsets = torch.empty(512, dtype=torch.int64), torch.empty(9, dtype=torch.int64)
        shard_gamma_grads(heads, heads, 1e-6, index, offsets, 8)
