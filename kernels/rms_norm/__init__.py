"""rms_norm: root-mean-square normalisation over the last dimension."""

from __future__ import annotations

import torch

from rlk.kernels._triton import from_triton
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.leaves import check_leaves
from rlk.kernels.rms_norm import cpu

_FORWARD: Backends = {"cpu": cpu.rms_norm, "triton": from_triton("rms_norm", "rms_norm")}
_GAMMA_GRAD: Backends = {"cpu": cpu.gamma_grad, "triton": from_triton("rms_norm", "gamma_grad")}


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float, *, backend: str | None = None) -> torch.Tensor:
    """Normalise every row: bf16(bf16(x·rstd)·γ), rstd = 1/sqrt(mean(x²) + eps).

    x: [..., width] bf16; gamma: [width] bf16; returns [..., width] bf16. Differentiable in x only: dx is bf16; the gradient of
    gamma is :func:`rms_norm_gamma_grad`, in fp32, outside autograd (which would cast it).
    Reduction order: row tree over width, the mean divides by the true width (contract, contraction rule 5).
    Raises ValueError on a wrong shape or dtype, BackendUnavailable for a backend that cannot run here.
    """
    if x.dtype != torch.bfloat16 or gamma.dtype != torch.bfloat16 or gamma.shape != x.shape[-1:]:
        raise ValueError(
            f"rms_norm: x {tuple(x.shape)} {x.dtype} and gamma {tuple(gamma.shape)} {gamma.dtype} must be bf16 with equal width"
        )
    result: torch.Tensor = select("rms_norm", _FORWARD, backend, x.device)(x, gamma, eps)
    return result


def rms_norm_gamma_grad(
    x: torch.Tensor, dy: torch.Tensor, eps: float, leaf_index: torch.Tensor, leaf_offsets: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Gradient of gamma: Σ over tokens of dy·bf16(x̂), [width] fp32.

    x, dy: [tokens, width] bf16. leaf_index: [n] int64 token rows (−1 = +0 fill), leaf_offsets: [leaves+1] int64, both from
    ``rlk.contract.topology.token_leaves``. Reduction order: token order (groups of 16 inside a leaf, tree over leaves).
    Raises ValueError on a wrong shape or dtype or on leaves that name other rows.
    """
    if x.dtype != torch.bfloat16 or dy.dtype != torch.bfloat16 or x.ndim != 2 or dy.shape != x.shape:
        raise ValueError(
            f"rms_norm_gamma_grad: x {tuple(x.shape)} {x.dtype} and dy {tuple(dy.shape)} {dy.dtype} must be equal bf16 [tokens, width]"
        )
    check_leaves("rms_norm_gamma_grad", leaf_index, leaf_offsets, x)
    result: torch.Tensor = select("rms_norm.gamma_grad", _GAMMA_GRAD, backend, x.device)(x, dy, eps, leaf_index, leaf_offsets)
    return result
