"""Triton backend of lm_head: det_gemm's kernels under lm_head's name."""

from __future__ import annotations

import torch

from rlk.kernels.det_gemm import triton
from rlk.kernels.det_gemm.operators import register_device
from rlk.kernels.lm_head import cpu

lm_head, lm_head_input_part, lm_head_weight_grad, _ = register_device("lm_head", cpu.OPERATORS, "cuda", triton)


def examples() -> None:
    """Calls for the ahead-of-time harness: fp32 logits of Qwen3-8B; det_gemm's examples cover the gradients."""
    with torch.device("meta"):
        hidden, weight = torch.empty(2048, 4096, dtype=torch.bfloat16), torch.empty(152576, 4096, dtype=torch.bfloat16)
        triton.product("lm_head", hidden, weight, 1, torch.float32)
