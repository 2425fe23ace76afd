"""qk_norm: root-mean-square normalisation of every query or key head."""

from __future__ import annotations

import torch

from rlk.contract.numerics import is_power_of_two
from rlk.contract.orders import fold_pairs
from rlk.kernels._triton import from_triton
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.leaves import check_leaves
from rlk.kernels.qk_norm import cpu

_FORWARD: Backends = {"cpu": cpu.qk_norm, "triton": from_triton("qk_norm", "qk_norm")}
_GAMMA_GRAD: Backends = {"cpu": cpu.shard_gamma_grads, "triton": from_triton("qk_norm", "shard_gamma_grads")}


def qk_norm(x: torch.Tensor, gamma: torch.Tensor, eps: float, *, backend: str | None = None) -> torch.Tensor:
    """Normalise every head: bf16(bf16(x·rstd)·γ), rstd = 1/sqrt(mean(x²) + eps); the arithmetic of rms_norm, applied before RoPE.

    x: [T, heads, D] bf16; gamma: [D] bf16; returns [T, heads, D] bf16. Differentiable in x only (dx bf16); the gradient of gamma is
    :func:`qk_norm_gamma_grad`. Reduction order: row tree over D. Raises ValueError on a wrong shape or dtype, BackendUnavailable
    for a backend that cannot run here.
    """
    if x.dtype != torch.bfloat16 or gamma.dtype != torch.bfloat16 or x.ndim != 3 or gamma.shape != x.shape[-1:]:
        raise ValueError(
            f"qk_norm: x {tuple(x.shape)} {x.dtype} must be bf16 [tokens, heads, dim] "
            f"and gamma {tuple(gamma.shape)} {gamma.dtype} bf16 [dim]"
        )
    result: torch.Tensor = select("qk_norm", _FORWARD, backend, x.device)(x, gamma, eps)
    return result


def qk_norm_shard_gamma_grads(
    x: torch.Tensor,
    dy: torch.Tensor,
    eps: float,
    leaf_index: torch.Tensor,
    leaf_offsets: torch.Tensor,
    shards: int,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Gradient of gamma per shard of heads, [shards, D] fp32: what a rank sends when CP ranks hold the other leaves.

    x, dy: [T, heads, D] bf16; leaf_index, leaf_offsets as in rms_norm_gamma_grad. Reduction order: one accumulator per (shard, leaf),
    tokens and then the shard's heads ascending in groups of 16; tree over leaves. Raises ValueError on a wrong shape or dtype,
    on shards that do not divide the heads and on leaves that name other rows.
    """
    if x.dtype != torch.bfloat16 or dy.dtype != torch.bfloat16 or x.ndim != 3 or dy.shape != x.shape:
        raise ValueError(
            f"qk_norm_gamma_grad: x {tuple(x.shape)} {x.dtype} and dy {tuple(dy.shape)} {dy.dtype} must be equal bf16 [tokens, heads, dim]"
        )
    if not is_power_of_two(shards) or x.shape[1] % shards:
        raise ValueError(f"qk_norm_gamma_grad: shards={shards} must be a power of two that divides {x.shape[1]} heads")
    check_leaves("qk_norm_gamma_grad", leaf_index, leaf_offsets, x)
    result: torch.Tensor = select("qk_norm.gamma_grad", _GAMMA_GRAD, backend, x.device)(x, dy, eps, leaf_index, leaf_offsets, shards)
    return result


def qk_norm_gamma_grad(
    x: torch.Tensor,
    dy: torch.Tensor,
    eps: float,
    leaf_index: torch.Tensor,
    leaf_offsets: torch.Tensor,
    shards: int,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Gradient of gamma: Σ over tokens and heads of dy·bf16(x̂), [D] fp32.

    The shards of :func:`qk_norm_shard_gamma_grads` (same arguments and errors), joined by the tree of adjacent pairs in fp32.
    """
    roots = qk_norm_shard_gamma_grads(x, dy, eps, leaf_index, leaf_offsets, shards, backend=backend)
    return fold_pairs(list(roots), torch.add)
