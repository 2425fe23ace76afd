"""CPU backend of attention as ``torch.library`` operators; arithmetic in attention.cpp."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from rlk.kernels._native import NativeLibrary

LIBRARY = NativeLibrary("attention", Path(__file__).with_name("attention.cpp"))


def _log2_scale(scale: float) -> float:
    """scale·log2(e) in fp64; the C ABI rounds it to fp32 once."""
    return scale * math.log2(math.e)


@torch.library.custom_op("rlk::attention", mutates_args=(), device_types="cpu")
def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, kv_tile: int, kv_split: int
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads, dim = q.shape
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != tokens or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(f"attention: cu_seqlens {cu_seqlens.tolist()} must ascend from 0 to {tokens}, the number of query rows")
    out = torch.empty(q.shape, dtype=q.dtype)
    lse2 = torch.empty(tokens, heads, dtype=torch.float32)
    LIBRARY.call(
        "attention_forward", q.contiguous(), k.contiguous(), v.contiguous(), cu_seqlens.contiguous(), out, lse2,
        cu_seqlens.numel() - 1, heads, k.shape[1], dim, kv_tile, kv_split, _log2_scale(scale),
    )  # fmt: skip
    return out, lse2


@attention_with_lse.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, kv_tile: int, kv_split: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("rlk::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse2: torch.Tensor, d_out: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    heads, dim = q.shape[1:]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v))
    LIBRARY.call(
        "attention_backward", q.contiguous(), k.contiguous(), v.contiguous(), out.contiguous(), d_out.contiguous(), lse2.contiguous(),
        cu_seqlens.contiguous(), torch.empty(lse2.shape), dq, dk, dv,
        cu_seqlens.numel() - 1, heads, k.shape[1], dim, _log2_scale(scale), float(scale), op="attention.backward",
    )  # fmt: skip
    return dq, dk, dv


@attention_backward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse2: torch.Tensor, d_out: torch.Tensor, cu_seqlens: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens, ctx.scale, _, _ = inputs
    out, lse2 = output
    ctx.mark_non_differentiable(lse2)
    ctx.save_for_backward(q, k, v, out, lse2, cu_seqlens)


def _backward(ctx, d_out, _):  # type: ignore[no-untyped-def]
    q, k, v, out, lse2, cu_seqlens = ctx.saved_tensors
    return *torch.ops.rlk.attention_backward(q, k, v, out, lse2, d_out, cu_seqlens, ctx.scale), None, None, None, None


attention_with_lse.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("rlk::paged_attention", mutates_args=(), device_types="cpu")
def paged_attention(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    scale: float, kv_tile: int, kv_split: int,
) -> torch.Tensor:  # fmt: skip
    tokens, heads, dim = q.shape
    blocks, kv_heads, page, _ = kv_cache.shape
    rows = query_start_loc.diff()
    if int(query_start_loc[0]) != 0 or int(query_start_loc[-1]) != tokens or bool((rows < 0).any()):
        raise ValueError(f"paged_attention: query_start_loc {query_start_loc.tolist()} must ascend from 0 to {tokens}, the number of query rows")
    if bool((seq_lens < rows).any()):
        raise ValueError(f"paged_attention: seq_lens {seq_lens.tolist()} must include the query rows {rows.tolist()}")
    needed = torch.where(rows > 0, (seq_lens + page - 1) // page, 0)
    if int(needed.max()) > block_table.shape[1]:
        raise ValueError(f"paged_attention: {int(needed.max())} pages are visible but block_table has {block_table.shape[1]} columns")
    visible = block_table[torch.arange(block_table.shape[1]) < needed[:, None]]
    if bool(((visible < 0) | (visible >= blocks)).any()):
        raise IndexError(f"paged_attention: block_table names a visible page outside the cache of {blocks} pages")
    out = torch.empty(q.shape, dtype=q.dtype)
    LIBRARY.call(
        "attention_paged", q.contiguous(), kv_cache[:1, :1, :1], block_table.contiguous(), query_start_loc.contiguous(), seq_lens.contiguous(), out,
        seq_lens.numel(), block_table.shape[1], heads, kv_heads, dim, page, *kv_cache.stride()[:3],
        kv_tile, kv_split, _log2_scale(scale), op="attention.paged",
    )  # fmt: skip
    return out


@paged_attention.register_fake
def _(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    scale: float, kv_tile: int, kv_split: int,
) -> torch.Tensor:  # fmt: skip
    return q.new_empty(q.shape)
