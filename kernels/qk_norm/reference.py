"""Specification of qk_norm in fp32 (any float dtype in; computed and returned in fp32)."""

from __future__ import annotations

import torch


def qk_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS norm of every head by one gamma of the head's width, before RoPE. Source: Qwen3 technical report, section 2 (QK-Norm).

    x: [T, heads, D]; gamma: [D].
    """
    x = x.float()
    return gamma.float() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
