"""Specification of det_gemm in fp32 (any float dtype in; computed and returned in fp32)."""

from __future__ import annotations

import torch


def det_gemm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y = x·wᵀ: [T, K] and [N, K] to [T, N]."""
    return x.float() @ w.float().T


def det_gemm_weight_grad(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """dw = dyᵀ·x over all tokens: [T, K] and [T, N] to [N, K]."""
    return dy.float().T @ x.float()
