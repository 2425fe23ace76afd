"""Specification of causal attention over packed sequences in fp32 (any float dtype in; computed and returned in fp32)."""

from __future__ import annotations

import torch


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, *, scale: float) -> torch.Tensor:
    """softmax(scale·q·kᵀ + causal mask)·v per sequence and head; query head h reads kv head h // (Hq // Hk).

    q: [T, Hq, D]; k, v: [T, Hk, D]; cu_seqlens: [S+1] row offsets; returns [T, Hq, D]. Source: Vaswani et al. 2017, eq. 1.
    """
    q, k, v = q.float(), k.float(), v.float()
    group = q.shape[1] // k.shape[1]
    pieces = []
    for first, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        keys, values = (x[first:end].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[first:end], keys) * scale
        hidden = torch.ones(end - first, end - first, dtype=torch.bool, device=q.device).triu(1)
        pieces.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values))
    return torch.cat(pieces)
