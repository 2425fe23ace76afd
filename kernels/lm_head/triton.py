"""Triton backend of lm_head: det_gemm's kernels under lm_head's name."""

from __future__ import annotations

import torch

from rlk.kernels.det_gemm.triton import input_grad, product, weight_grad
from rlk.kernels.lm_head.cpu import lm_head, lm_head_input_grad


@lm_head.register_kernel("cuda")
def _(h: torch.Tensor, w: torch.Tensor, grad_splits: int) -> torch.Tensor:
    return product("lm_head", h, w, 1, torch.float32)


@lm_head_input_grad.register_kernel("cuda")
def _(dy: torch.Tensor, w: torch.Tensor, splits: int) -> torch.Tensor:
    return input_grad("lm_head.input_grad", dy, w, splits)


def lm_head_input_part(dy: torch.Tensor, w: torch.Tensor, splits: int) -> torch.Tensor:
    return input_grad("lm_head.input_grad", dy, w, splits, torch.float32)


def lm_head_weight_grad(h: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return weight_grad("lm_head.weight_grad", h, dy, index, offsets)


def examples() -> None:
    """Calls for the ahead-of-time harness: fp32 logits of Qwen3-8B; det_gemm's examples cover the gradients."""
    with torch.device("meta"):
        product("lm_head", torch.empty(2048, 4096, dtype=torch.bfloat16), torch.empty(152576, 4096, dtype=torch.bfloat16), 1, torch.float32)
