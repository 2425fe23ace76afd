"""Validation of token leaves, shared by every weight gradient."""

from __future__ import annotations

import torch

from rlk.contract.numerics import is_power_of_two
from rlk.kernels.checked import check_device, check_once


def check_leaves(op: str, index: torch.Tensor, offsets: torch.Tensor, tokens: torch.Tensor) -> None:
    """Refuse, before any launch, leaves that do not fit ``tokens``, [T, …], or lie on another device.

    index: [n] int64 token rows in [-1, T); offsets: [leaves + 1] int64, 0 … n ascending, leaves a power of two
    (``rlk.contract.topology.token_leaves`` or a rank's own part of them). Raises ValueError.
    """
    if index.dtype != torch.int64 or offsets.dtype != torch.int64 or index.ndim != 1 or offsets.ndim != 1:
        shapes = f"leaf_index {tuple(index.shape)} {index.dtype} and leaf_offsets {tuple(offsets.shape)} {offsets.dtype}"
        raise ValueError(f"{op}: {shapes} must be int64 vectors")
    check_device(op, tokens=tokens, leaf_index=index, leaf_offsets=offsets)
    rows = tokens.shape[0]
    check_once(offsets, ("leaf_offsets", index.numel()), lambda: _check_offsets(op, index, offsets))
    check_once(index, ("leaf_index", rows), lambda: _check_index(op, index, rows))


def _check_offsets(op: str, index: torch.Tensor, offsets: torch.Tensor) -> None:
    edges = offsets.tolist()
    if not is_power_of_two(len(edges) - 1) or edges[0] != 0 or edges[-1] != index.numel() or edges != sorted(edges):
        raise ValueError(f"{op}: leaf_offsets {edges} must ascend from 0 to {index.numel()} over a power-of-two number of leaves")


def _check_index(op: str, index: torch.Tensor, rows: int) -> None:
    if index.numel() and (int(index.min()) < -1 or int(index.max()) >= rows):
        raise ValueError(f"{op}: leaf_index holds rows {int(index.min())}…{int(index.max())}, only -1…{rows - 1} exist")
