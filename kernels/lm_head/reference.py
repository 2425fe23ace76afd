"""Specification of lm_head in fp32 (any float dtype in; computed and returned in fp32)."""

from __future__ import annotations

import torch


def lm_head(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """logits = h·wᵀ: [T, H] and [V, H] to [T, V]."""
    return h.float() @ w.float().T
