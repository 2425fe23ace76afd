"""pack: padded batches to packed token rows and back, as exact copies."""

from __future__ import annotations

import torch

from rlk.kernels._triton import from_triton
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.pack import cpu

_PACK: Backends = {"cpu": cpu.pack, "triton": from_triton("pack", "pack")}
_UNPACK: Backends = {"cpu": cpu.unpack, "triton": from_triton("pack", "unpack")}


def pack(x: torch.Tensor, mask: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Copy the rows x[b, s] with mask[b, s], b then s ascending; what lies at the other places is never read as a value.

    x: [B, S, ...] of any dtype; mask: [B, S] bool; returns [T, ...], T = true places. Differentiable: dx is dy at the true places
    and +0 at the others. Raises ValueError on a mask of another shape or dtype, BackendUnavailable for a backend that cannot run here.
    """
    if mask.dtype != torch.bool or mask.ndim != 2 or x.shape[:2] != mask.shape:
        raise ValueError(f"pack: mask {tuple(mask.shape)} {mask.dtype} must be bool with the first two sizes of x {tuple(x.shape)}")
    result: torch.Tensor = select("pack", _PACK, backend, x.device)(x, mask)
    return result


def unpack(x: torch.Tensor, mask: torch.Tensor, fill: float = 0, *, backend: str | None = None) -> torch.Tensor:
    """Copy the rows of x to the true places of mask, b then s ascending; the other places are ``fill``.

    x: [T, ...] of any dtype; mask: [B, S] bool with T true places; returns [B, S, ...]. Differentiable: dx is dy at the true places.
    Raises ValueError on another number of rows or a mask of another dtype, BackendUnavailable for a backend that cannot run here.
    """
    if mask.dtype != torch.bool or mask.ndim != 2 or x.ndim < 1:
        raise ValueError(f"unpack: mask {tuple(mask.shape)} {mask.dtype} must be bool [batch, sequence] and x {tuple(x.shape)} hold rows")
    result: torch.Tensor = select("pack.unpack", _UNPACK, backend, x.device)(x, mask, fill)
    return result
