"""Specification of silu in fp32 (any float dtype in; computed and returned in fp32)."""

from __future__ import annotations

import torch


def silu(x: torch.Tensor) -> torch.Tensor:
    """x·σ(x). Source: Elfwing et al. 2017, eq. 5."""
    x = x.float()
    return x * torch.sigmoid(x)
