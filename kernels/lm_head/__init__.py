"""lm_head: hidden states to fp32 logits, which stay unrounded."""

from __future__ import annotations

import torch

from rlk.kernels.det_gemm import check_input_part, check_product, check_weight_grad
from rlk.kernels.det_gemm.operators import backends
from rlk.kernels.dispatch import select
from rlk.kernels.lm_head import cpu, vendor

_FORWARD, _INPUT_PART, _WEIGHT_GRAD = backends("lm_head", cpu.OPERATORS, vendor.OPERATORS)


def lm_head(h: torch.Tensor, w: torch.Tensor, *, grad_splits: int = 8, backend: str | None = None) -> torch.Tensor:
    """logits = h·wᵀ, fp32.

    h: [T, H] bf16; w: [V, H] bf16; returns [T, V] fp32. Reduction order: plain order over H (see :func:`rlk.kernels.det_gemm.det_gemm`).
    Differentiable in h only: dh = bf16(dlogits·w), contracted over V in ``grad_splits`` contiguous leaves (the vocabulary shards), split
    order, dlogits taken as bf16. Raises ValueError on a wrong shape or dtype or if grad_splits does not divide V,
    BackendUnavailable for a backend that cannot run here.
    """
    check_product("lm_head", h, w, 1, grad_splits)
    result: torch.Tensor = select("lm_head", _FORWARD, backend, h.device)(h, w, 1, grad_splits, torch.float32)
    return result


def lm_head_input_part(dlogits: torch.Tensor, w: torch.Tensor, *, splits: int, backend: str | None = None) -> torch.Tensor:
    """dlogits·w unrounded, [T, H] fp32: what a rank that holds ``splits`` adjacent vocabulary shards adds to the gradient of h.

    dlogits: [T, V], taken as bf16; w: [V, H] bf16. Order and errors as in :func:`rlk.kernels.det_gemm.det_gemm_input_part`.
    """
    check_input_part("lm_head", dlogits, w, splits)
    result: torch.Tensor = select("lm_head.input_grad", _INPUT_PART, backend, dlogits.device)(dlogits, w, splits)
    return result


def lm_head_weight_grad(
    h: torch.Tensor, dlogits: torch.Tensor, leaf_index: torch.Tensor, leaf_offsets: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Gradient of w: Σ over tokens of dlogits[t, v]·h[t, i], [V, H] fp32, token order.

    h: [T, H] bf16; dlogits: [T, V] bf16. leaf_index: [n] int64 token rows (-1 = +0 fill), leaf_offsets: [leaves+1] int64, both from
    ``rlk.contract.topology.token_leaves``. Raises ValueError on a wrong shape or dtype or on leaves that do not fit the tokens.
    """
    check_weight_grad("lm_head", h, dlogits, leaf_index, leaf_offsets)
    result: torch.Tensor = select("lm_head.weight_grad", _WEIGHT_GRAD, backend, h.device)(h, dlogits, leaf_index, leaf_offsets)
    return result
