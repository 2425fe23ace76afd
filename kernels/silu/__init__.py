"""silu: x·sigmoid(x) per element."""

from __future__ import annotations

import torch

from rlk.kernels._triton import from_triton
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.silu import cpu

_FORWARD: Backends = {"cpu": cpu.silu, "triton": from_triton("silu", "silu")}


def silu(x: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """bf16(x/(1 + exp(−x))), fp32 inside.

    x: [...] bf16; returns the same shape in bf16. Differentiable: dx = bf16(dy·(σ·(1 + x·(1 − σ)))), σ = 1/(1 + exp(−x)).
    Raises ValueError on another dtype, BackendUnavailable for a backend that cannot run here.
    """
    if x.dtype != torch.bfloat16:
        raise ValueError(f"silu: x {tuple(x.shape)} {x.dtype} must be bf16")
    result: torch.Tensor = select("silu", _FORWARD, backend, x.device)(x)
    return result
