"""Vendor backend of det_gemm: cuBLASLt with split-K off, whose matrix instructions add in the contract's order.

The library chooses its kernel by shape, so nothing about its order is taken for granted: every distinct product is certified against the
canonical chain before its bytes are used (see ``vendor_certificate``). Rows are filled to whole groups of 16 with +0, so that the library
never takes its kernels for single vectors. Leaves are joined here, in fp32, by the tree of adjacent pairs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlk.contract.orders import fold_pairs
from rlk.kernels.det_gemm.operators import register
from rlk.kernels.det_gemm.vendor_certificate import LIBRARY, certify
from rlk.kernels.dispatch import BackendUnavailable, record

_ROWS = 16
_ALIGNED = 8
"""Elements of bf16 that a row's length must be a multiple of: 16 bytes."""


@contextmanager
def split_k_off() -> Iterator[None]:
    """cuBLASLt without split-K and without bf16 reductions; both settings are put back."""
    matmul = torch.backends.cuda.matmul
    library, reduction = torch.backends.cuda.preferred_blas_library(), matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = reduction
        torch.backends.cuda.preferred_blas_library(library)


def product(op: str, x: torch.Tensor, w: torch.Tensor, splits: int, out_dtype: torch.dtype) -> torch.Tensor:
    """x·wᵀ: [T, K] and [N, K] to [T, N], contracted over K in ``splits`` leaves."""
    _refuse_unaligned(op, *w.shape)
    rows, x, w = x.shape[0], _filled(x), _readable(w)
    depth = w.shape[1] // splits
    leaves = [slice(first, first + depth) for first in range(0, w.shape[1], depth)]
    out = _joined([(x[:, leaf], w[:, leaf].T) for leaf in leaves], out_dtype)[:rows]
    record(op, "vendor", LIBRARY.kernel_id)
    return out


def input_grad(op: str, dy: torch.Tensor, w: torch.Tensor, splits: int, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """dy·w: [T, N] and [N, K] to [T, K], contracted over N in ``splits`` leaves."""
    _refuse_unaligned(op, *w.shape)
    rows, dy, w = dy.shape[0], _filled(dy.to(torch.bfloat16)), _readable(w)
    depth = w.shape[0] // splits
    leaves = [slice(first, first + depth) for first in range(0, w.shape[0], depth)]
    out = _joined([(dy[:, leaf], w[leaf]) for leaf in leaves], out_dtype)[:rows]
    record(op, "vendor", LIBRARY.kernel_id)
    return out


def weight_grad(op: str, x: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """dyᵀ·x: [T, K] and [T, N] to [N, K] fp32, contracted over tokens in leaf order.

    The library must be told how long a leaf is: the host waits for ``offsets``, so a graph cannot capture this.
    """
    _refuse_unaligned(op, dy.shape[1], x.shape[1])
    pairs = []
    for first, last in itertools.pairwise(offsets.tolist()):
        named = index[first:last, None]
        pairs.append(tuple(torch.where(named >= 0, rows[named[:, 0].clamp(min=0)], 0) for rows in (dy, x)))
    out = _joined([(grad.T, value) for grad, value in pairs], torch.float32)
    record(op, "vendor", LIBRARY.kernel_id)
    return out


def multiply(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """a·b by the library, certified or not: [M, K] and [K, N] bf16 to [M, N]."""
    with split_k_off():
        return torch.mm(a, b) if out_dtype == torch.bfloat16 else torch.mm(a, b, out_dtype=out_dtype)


def quiet(x: torch.Tensor) -> torch.Tensor:
    """x with every NaN the quiet one."""
    return x.masked_fill_(x.isnan(), torch.nan)


def _joined(leaves: list[tuple[torch.Tensor, torch.Tensor]], out_dtype: torch.dtype) -> torch.Tensor:
    """Pair tree over the products of ``leaves``, rounded once."""
    dtype = out_dtype if len(leaves) == 1 else torch.float32
    parts = [_certified_product(a, b, dtype) for a, b in leaves]
    return quiet(fold_pairs(parts, torch.add).to(out_dtype))


def _certified_product(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    if not a.numel():
        return a.new_zeros(a.shape[0], b.shape[1], dtype=out_dtype)
    certify(a, b, out_dtype, multiply, quiet)
    return multiply(a, b, out_dtype)


def _refuse_unaligned(op: str, *sizes: int) -> None:
    for size in sizes:
        if size % _ALIGNED:
            raise BackendUnavailable(
                f"{op}: backend 'vendor' needs widths that are multiples of {_ALIGNED}, not {size}: use backend 'triton'"
            )


def _readable(x: torch.Tensor) -> torch.Tensor:
    """x with unit stride along its rows and 16-byte aligned ones."""
    aligned = x.stride(1) == 1 and x.stride(0) % _ALIGNED == 0 and x.stride(0) >= x.shape[1] and x.data_ptr() % 16 == 0
    return x if aligned else x.clone(memory_format=torch.contiguous_format)


def _filled(x: torch.Tensor) -> torch.Tensor:
    """x with rows of +0 up to a whole group of 16."""
    missing = -x.shape[0] % _ROWS
    if not missing:
        return _readable(x)
    out = x.new_zeros(x.shape[0] + missing, x.shape[1])
    out[: x.shape[0]] = x
    return out


OPERATORS = register("det_gemm", "det_gemm_vendor", "cuda", sys.modules[__name__])
