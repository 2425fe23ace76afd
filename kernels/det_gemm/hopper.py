"""Oracle of det_gemm's bytes on a Hopper card, on any CPU: every order of the contract with the arithmetic of that card's instruction.

It is no backend: nothing dispatches to it. A card's bytes are compared with it, and bytes recorded on a card are checked again where there
is none (``benchmarks/results/hopper_golden.json``). What one instruction computes stands in hopper.cpp; ``mma.sync`` and ``wgmma`` agree.
"""

from __future__ import annotations

from pathlib import Path

import torch

from rlk.kernels._native import NativeLibrary
from rlk.kernels.leaves import check_leaves

LIBRARY = NativeLibrary("det_gemm.hopper", Path(__file__).with_name("hopper.cpp"))


def det_gemm(x: torch.Tensor, w: torch.Tensor, splits: int = 1, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """x·wᵀ as :func:`rlk.kernels.det_gemm.det_gemm` computes it on a Hopper card.

    x: [T, K] bf16; w: [N, K] bf16; returns [T, N] in out_dtype (bf16 or fp32). Reduction order: ``splits`` leaves of K, in each one fp32
    accumulator from +0 and one instruction per 16 products, leaves joined by the tree of adjacent pairs. The gradient of the input is
    ``det_gemm(dy, w.T, grad_splits)``. Raises ValueError unless the operands fit and ``splits`` divides K.
    """
    if x.dtype != torch.bfloat16 or w.dtype != torch.bfloat16 or x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} and w {tuple(w.shape)} {w.dtype} must be bf16 [T, K] and [N, K]")
    if splits < 1 or splits & (splits - 1) or x.shape[1] % splits:
        raise ValueError(f"splits={splits} must be a power of two that divides {x.shape[1]}")
    edges = torch.arange(splits + 1) * (x.shape[1] // splits)
    return _product(x, w, edges, out_dtype)


def det_gemm_weight_grad(x: torch.Tensor, dy: torch.Tensor, leaf_index: torch.Tensor, leaf_offsets: torch.Tensor) -> torch.Tensor:
    """dyᵀ·x in token order, [N, K] fp32, as :func:`rlk.kernels.det_gemm.det_gemm_weight_grad` computes it on a Hopper card.

    x: [T, K] bf16; dy: [T, N] bf16; leaf_index [n], leaf_offsets [leaves + 1] int64, from ``rlk.contract.topology.token_leaves``.
    Raises ValueError on leaves that do not fit the tokens.
    """
    check_leaves("det_gemm", leaf_index, leaf_offsets, x)
    filled = (leaf_index < 0)[:, None]
    gathered = (torch.where(filled, torch.zeros_like(rows[:1]), rows[leaf_index.clamp(min=0)]) for rows in (dy, x))
    a, b = (rows.T for rows in gathered)
    return _product(a, b, leaf_offsets, torch.float32)


def step(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """c + Σ a·b over the last axis by one instruction each: a, b [count, 16] bf16, c [count] fp32, returns [count] fp32."""
    out = torch.empty_like(c)
    LIBRARY.call("hopper_steps", a.contiguous(), b.contiguous(), c.contiguous(), out, len(c))
    return out


def _product(a: torch.Tensor, b: torch.Tensor, edges: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    (rows, k), columns = a.shape, b.shape[0]
    out = torch.empty(rows, columns, dtype=out_dtype)
    bf16 = int(out_dtype == torch.bfloat16)
    operands = a.contiguous(), b.contiguous(), edges.contiguous()
    LIBRARY.call("hopper_product", *operands, len(edges) - 1, out, bf16, rows, columns, k)
    return out
