"""Specification of rms_norm in fp32 (any float dtype in; computed and returned in fp32)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float) -> torch.Tensor:
    """y = γ · x / sqrt(mean(x²) + eps) over the last dimension. Source: Zhang & Sennrich 2019, eq. 4."""
    x = x.float()
    return gamma.float() * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
