"""Specification of logp in the precision of its logits (fp32 or fp64)."""

from __future__ import annotations

import torch


def logp(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, vocab_size: int, support: torch.Tensor | None = None
) -> torch.Tensor:
    """log softmax(z/T)[id] over the row's support: real columns (< vocab_size) that ``support`` holds. [T] in the dtype of ``logits``."""
    allowed = torch.arange(logits.shape[1], device=logits.device) < vocab_size
    if support is not None:
        allowed = allowed & support
    scaled = (logits / temperature.to(logits.dtype)[:, None]).masked_fill(~allowed, -torch.inf)
    return scaled.gather(1, ids[:, None])[:, 0] - torch.logsumexp(scaled, dim=1)
