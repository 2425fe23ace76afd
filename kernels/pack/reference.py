"""Specification of pack and unpack, one token after another."""

from __future__ import annotations

import torch


def pack(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows x[b, s] with mask[b, s], b then s ascending. x: [B, S, ...]; mask: [B, S] bool."""
    rows = [x[b, s] for b in range(mask.shape[0]) for s in range(mask.shape[1]) if mask[b, s]]
    return torch.stack(rows) if rows else x.new_empty(0, *x.shape[2:])


def unpack(x: torch.Tensor, mask: torch.Tensor, fill: float) -> torch.Tensor:
    """The rows of x at the true places of mask, b then s ascending, ``fill`` at the others. x: [T, ...]."""
    rows, blank = iter(x), x.new_full(x.shape[1:], fill)
    return torch.stack([torch.stack([next(rows) if real else blank for real in line]) for line in mask.tolist()])
