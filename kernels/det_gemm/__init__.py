"""det_gemm: bf16 matrix product whose every element is summed in one fixed order, whatever the shape, tile or thread count."""

from __future__ import annotations

import torch

from rlk.contract.numerics import is_power_of_two
from rlk.kernels.checked import check_device
from rlk.kernels.det_gemm import cpu, vendor
from rlk.kernels.det_gemm.operators import backends
from rlk.kernels.dispatch import select
from rlk.kernels.leaves import check_leaves

_FORWARD, _INPUT_PART, _WEIGHT_GRAD = backends("det_gemm", cpu.OPERATORS, vendor.OPERATORS)


def check_product(op: str, x: torch.Tensor, w: torch.Tensor, splits: int, grad_splits: int) -> None:
    """Raise ValueError unless x [T, K] and w [N, K] are bf16 and the leaf counts are powers of two that divide K and N."""
    if x.dtype != torch.bfloat16 or w.dtype != torch.bfloat16:
        raise ValueError(f"{op}: x {x.dtype} and w {w.dtype} must both be bf16")
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"{op}: x {tuple(x.shape)} and w {tuple(w.shape)} must be [T, K] and [N, K]")
    check_device(op, x=x, w=w)
    for name, count, size in (("splits", splits, w.shape[1]), ("grad_splits", grad_splits, w.shape[0])):
        if not is_power_of_two(count) or size % count:
            raise ValueError(f"{op}: {name}={count} must be a power of two that divides {size}")


def check_input_part(op: str, dy: torch.Tensor, w: torch.Tensor, splits: int) -> None:
    """Raise ValueError unless dy [T, N] is floating point, w [N, K] bf16 and splits a power of two that divides N."""
    if not dy.is_floating_point() or w.dtype != torch.bfloat16 or dy.dim() != 2 or w.dim() != 2 or dy.shape[1] != w.shape[0]:
        raise ValueError(f"{op}: dy {tuple(dy.shape)} {dy.dtype} and w {tuple(w.shape)} {w.dtype} must be [T, N] and bf16 [N, K]")
    check_device(op, dy=dy, w=w)
    if not is_power_of_two(splits) or w.shape[0] % splits:
        raise ValueError(f"{op}: splits={splits} must be a power of two that divides {w.shape[0]}")


def check_weight_grad(op: str, x: torch.Tensor, dy: torch.Tensor, leaf_index: torch.Tensor, leaf_offsets: torch.Tensor) -> None:
    """Raise ValueError unless x [T, K] and dy [T, N] are bf16 and the leaves are int64, in order, and name only rows that exist."""
    if x.dtype != torch.bfloat16 or dy.dtype != torch.bfloat16:
        raise ValueError(f"{op}: x {x.dtype} and dy {dy.dtype} must both be bf16")
    if x.dim() != 2 or dy.dim() != 2 or x.shape[0] != dy.shape[0]:
        raise ValueError(f"{op}: x {tuple(x.shape)} and dy {tuple(dy.shape)} must be [T, K] and [T, N]")
    check_device(op, x=x, dy=dy)
    check_leaves(op, leaf_index, leaf_offsets, x)


def det_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    *,
    splits: int = 1,
    grad_splits: int = 1,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str | None = None,
) -> torch.Tensor:
    """y = x·wᵀ with fp32 accumulation and one rounding at the end.

    x: [T, K] bf16; w: [N, K] bf16; returns [T, N] in out_dtype (bf16, or fp32 for the unrounded sums).
    Reduction order (contract, contraction rules 1 and 2): ``splits`` contiguous leaves of K. In a leaf, one fp32 accumulator from +0 and
    groups of 16 products counted from the leaf's first k, the tail filled with +0. On the CPU a group is summed by a row tree,
    fma(a[i], b[i], a[i+8]·b[i+8]) for i < 8 and then upper half onto lower, and added to the accumulator once. Leaves are joined in fp32
    by the tree of adjacent pairs. On a card one matrix instruction adds a group.
    No element depends on T, N, its position, or the number of threads. NaN and Inf propagate; a NaN result is the quiet NaN 0x7fc0(0000).
    Differentiable in x only: dx = bf16(dy·w), contracted over N in ``grad_splits`` leaves, dy taken as bf16. The gradient of w is
    :func:`det_gemm_weight_grad`, in fp32, outside autograd (which would cast it).
    Raises ValueError on a wrong shape or dtype or a leaf count that does not divide, BackendUnavailable for a backend that cannot run here.
    Backend "vendor" (cuBLASLt, CUDA only) wants K and N to be multiples of 8 and raises VendorNotCertified if the library's bytes are not
    those of the canonical chain; the first product of its kind is probed for that, outside graph captures.
    """
    check_product("det_gemm", x, w, splits, grad_splits)
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"det_gemm: out_dtype {out_dtype} must be torch.bfloat16 or torch.float32")
    result: torch.Tensor = select("det_gemm", _FORWARD, backend, x.device)(x, w, splits, grad_splits, out_dtype)
    return result


def det_gemm_input_part(dy: torch.Tensor, w: torch.Tensor, *, splits: int, backend: str | None = None) -> torch.Tensor:
    """dy·w unrounded, [T, K] fp32: what a rank that holds ``splits`` adjacent shards of N adds to the gradient of the input.

    dy: [T, N], taken as bf16; w: [N, K] bf16. Reduction order: that of the input gradient in :func:`det_gemm`, which is the bf16 of this
    for a rank that holds all shards. Raises ValueError on a wrong shape or dtype or a leaf count that does not divide.
    """
    check_input_part("det_gemm", dy, w, splits)
    result: torch.Tensor = select("det_gemm.input_grad", _INPUT_PART, backend, dy.device)(dy, w, splits)
    return result


def det_gemm_weight_grad(
    x: torch.Tensor, dy: torch.Tensor, leaf_index: torch.Tensor, leaf_offsets: torch.Tensor, *, backend: str | None = None
) -> torch.Tensor:
    """Gradient of w: Σ over tokens of dy[t, n]·x[t, k], [N, K] fp32.

    x: [T, K] bf16; dy: [T, N] bf16. leaf_index: [n] int64 token rows (-1 = +0 fill), leaf_offsets: [leaves+1] int64, both from
    ``rlk.contract.topology.token_leaves``. Reduction order: token order (groups of 16 inside a leaf, one fp32 accumulator per leaf, tree of
    adjacent pairs over leaves; contract, contraction rule 3).
    Raises ValueError on a wrong shape or dtype or on leaves that do not fit the tokens.
    """
    check_weight_grad("det_gemm", x, dy, leaf_index, leaf_offsets)
    result: torch.Tensor = select("det_gemm.weight_grad", _WEIGHT_GRAD, backend, x.device)(x, dy, leaf_index, leaf_offsets)
    return result
