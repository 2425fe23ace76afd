"""swiglu: silu(gate)·up over the packed gate and up projections."""

from __future__ import annotations

import torch

from rlk.kernels._triton import from_triton
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.swiglu import cpu

_FORWARD: Backends = {"cpu": cpu.swiglu, "triton": from_triton("swiglu", "swiglu")}


def swiglu(gate_up: torch.Tensor, shards: int = 8, *, backend: str | None = None) -> torch.Tensor:
    """bf16(g/(1 + exp(−g))·u), fp32 inside and rounded once.

    gate_up: [T, 2I] bf16 whose columns are, per canonical shard, [gate of the shard | up of the shard]; a rank passes the number of
    shards that it holds. Returns [T, I] bf16, shards ascending, which is the plain order of the intermediate dimension.
    Differentiable: dg = bf16((dy·u)·(σ·(1 + g·(1 − σ)))), σ = 1/(1 + exp(−g)); du = bf16(dy·(g/(1 + exp(−g)))), in the layout of
    gate_up. Raises ValueError on a wrong shape or dtype, BackendUnavailable for a backend that cannot run here.
    """
    if gate_up.dtype != torch.bfloat16 or gate_up.ndim != 2 or shards < 1 or gate_up.shape[1] % (2 * shards):
        raise ValueError(f"swiglu: gate_up {tuple(gate_up.shape)} {gate_up.dtype} must be bf16 [tokens, multiple of 2·{shards} shards]")
    result: torch.Tensor = select("swiglu", _FORWARD, backend, gate_up.device)(gate_up, shards)
    return result
