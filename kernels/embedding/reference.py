"""Specification of embedding: a row per id, in fp32 (any float dtype in)."""

from __future__ import annotations

import torch


def embedding(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """weight[ids], so that d weight[v] is the sum of dy over the tokens whose id is v. ids: [T]; weight: [V, H]; returns [T, H]."""
    return weight.float()[ids]
