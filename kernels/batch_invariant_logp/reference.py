"""Specification of batch_invariant_logp in fp32 (any float dtype in; computed and returned in fp32)."""

from __future__ import annotations

import torch


def batch_invariant_logp(
    h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, vocab_size: int, support: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """log softmax(h·wᵀ/T)[id] and the LSE over the row's support: real columns (< vocab_size) that ``support`` holds.

    h: [T, H]; w: [V, H]; ids, temperature: [T]; support: [T, V] bool; returns [T] and [T].
    """
    allowed = torch.arange(w.shape[0], device=w.device) < vocab_size
    if support is not None:
        allowed = allowed & support
    scaled = ((h.float() @ w.float().T) / temperature[:, None]).masked_fill(~allowed, -torch.inf)
    lse = torch.logsumexp(scaled, dim=1)
    return scaled.gather(1, ids[:, None])[:, 0] - lse, lse
