"""Specification of swiglu in fp32 (any float dtype in; computed and returned in fp32)."""

from __future__ import annotations

import torch


def swiglu(gate_up: torch.Tensor, shards: int) -> torch.Tensor:
    """silu(gate)·up. Source: Shazeer 2020, eq. 6, without the projections.

    gate_up: [T, 2I], columns per shard [gate | up]; returns [T, I].
    """
    gate, up = gate_up.float().unflatten(-1, (shards, 2, -1)).unbind(-2)
    return (gate * torch.sigmoid(gate) * up).flatten(-2)
