"""rope: rotary position embedding from one hashed fp32 table."""

from __future__ import annotations

import functools
import hashlib
import struct

import torch

from rlk.kernels._triton import from_triton
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.rope import cpu

_FORWARD: Backends = {"cpu": cpu.rope, "triton": from_triton("rope", "rope")}


@functools.lru_cache(maxsize=8)
def rope_table(head_dim: int, theta: float, max_positions: int) -> torch.Tensor:
    """cos and sin of position·theta^(−2i/head_dim), fp32 [2, max_positions, head_dim/2], always built on the CPU.

    Each element is computed alone in fp64 and rounded once. Calls with equal arguments share one tensor: do not write to it;
    move it to a device with ``.to``. Raises ValueError for an odd head_dim or a size below 1.
    """
    if head_dim < 2 or head_dim % 2 or max_positions < 1 or not theta > 0:
        raise ValueError(
            f"rope_table: head_dim={head_dim} must be even and positive, theta={theta} and max_positions={max_positions} positive"
        )
    frequencies = [float(theta) ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    with torch.inference_mode(False):  # the shared tensor must stay usable in a backward pass, wherever it was first asked for
        return cpu.build_table(torch.tensor(frequencies, dtype=torch.float64, device="cpu"), max_positions)


def table_hash(table: torch.Tensor) -> str:
    """SHA-256 (hex) over the shape (three little-endian int64) and the raw bytes of a table of :func:`rope_table`, on any device."""
    sha = hashlib.sha256(struct.pack("<3q", *table.shape))
    sha.update(table.cpu().contiguous().numpy().tobytes())
    return sha.hexdigest()


def rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Rotate the pair (x[i], x[i + D/2]) of every head: bf16(x₁·cos − x₂·sin), bf16(x₂·cos + x₁·sin), fp32 without FMA.

    x: [T, heads, D] bf16; positions: [T] int64; table: [2, max_positions, D/2] fp32 from :func:`rope_table`; returns [T, heads, D] bf16.
    Differentiable in x: dx is dy rotated back by the same table entries, one rounding to bf16.
    Raises ValueError on a wrong shape or dtype, IndexError for a position outside the table, BackendUnavailable for a backend that
    cannot run here. In a captured graph, which cannot raise, the rows of a position outside the table are NaN.
    """
    if x.dtype != torch.bfloat16 or x.ndim != 3 or positions.dtype != torch.int64 or positions.shape != x.shape[:1]:
        raise ValueError(
            f"rope: x {tuple(x.shape)} {x.dtype} must be bf16 [tokens, heads, dim] "
            f"and positions {tuple(positions.shape)} {positions.dtype} int64 [tokens]"
        )
    if table.dtype != torch.float32 or table.ndim != 3 or table.shape[0] != 2 or 2 * table.shape[2] != x.shape[2]:
        raise ValueError(
            f"rope: table {tuple(table.shape)} {table.dtype} must be fp32 [2, positions, {x.shape[2] // 2}]: build it with rope_table"
        )
    result: torch.Tensor = select("rope", _FORWARD, backend, x.device)(x, positions, table)
    return result
