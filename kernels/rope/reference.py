"""Specification of rope in fp64 (any float dtype in; computed and returned in fp64)."""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate the pair (x[i], x[i + D/2]) by the angle position·theta^(−2i/D). Source: Su et al. 2021, eq. 34, half-split pairing.

    x: [T, heads, D]; positions: [T].
    """
    first, second = x.double().chunk(2, dim=-1)
    exponent = torch.arange(first.shape[-1], dtype=torch.float64, device=x.device) * 2 / x.shape[-1]
    angle = (positions.double()[:, None] * theta**-exponent)[:, None, :]
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()), dim=-1)
