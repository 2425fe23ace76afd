"""CPU backend of det_gemm as ``torch.library`` operators; arithmetic in det_gemm.cpp.

The three contractions are one C++ function over plain or transposed operands. ``op`` names the operator that asked, so that lm_head,
which shares this library, is read back under its own name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from rlk.kernels._native import NativeLibrary
from rlk.kernels.det_gemm.operators import register

LIBRARY = NativeLibrary("det_gemm", Path(__file__).with_name("det_gemm.cpp"))


def product(op: str, x: torch.Tensor, w: torch.Tensor, splits: int, out_dtype: torch.dtype) -> torch.Tensor:
    """x·wᵀ: [T, K] and [N, K] to [T, N], contracted over K in ``splits`` leaves."""
    x, w = x.contiguous(), w.contiguous()
    (rows, k), columns = x.shape, w.shape[0]
    out = torch.empty(rows, columns, dtype=out_dtype)
    bf16 = int(out_dtype == torch.bfloat16)
    LIBRARY.call("det_gemm", x, 0, w, 0, None, None, splits, out, bf16, rows, columns, k, op=op)
    return out


def input_grad(op: str, dy: torch.Tensor, w: torch.Tensor, splits: int, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """dy·w: [T, N] and [N, K] to [T, K], contracted over N in ``splits`` leaves."""
    dy, w = dy.to(torch.bfloat16).contiguous(), w.contiguous()
    (rows, n), k = dy.shape, w.shape[1]
    out = torch.empty(rows, k, dtype=out_dtype)
    LIBRARY.call("det_gemm", dy, 0, w, 1, None, None, splits, out, int(out_dtype == torch.bfloat16), rows, k, n, op=op)
    return out


def weight_grad(op: str, x: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """dyᵀ·x: [T, K] and [T, N] to [N, K] fp32, contracted over tokens in leaf order."""
    x, dy = x.contiguous(), dy.contiguous()
    k, n = x.shape[1], dy.shape[1]
    out = torch.empty(n, k, dtype=torch.float32)
    index, offsets = index.contiguous(), offsets.contiguous()
    LIBRARY.call("det_gemm", dy, 1, x, 1, index, offsets, offsets.numel() - 1, out, 0, n, k, index.numel(), op=op)
    return out


OPERATORS = register("det_gemm", "det_gemm", "cpu", sys.modules[__name__])
