"""CPU backend of attention as ``torch.library`` operators; arithmetic in attention.cpp."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from rlk.kernels._native import NativeLibrary

LIBRARY = NativeLibrary("attention", Path(__file__).with_name("attention.cpp"))

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _log2_scale(scale: float) -> float:
    """scale·log2(e) in fp64; the C ABI rounds it to fp32 once."""
    return scale * math.log2(math.e)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, scale: float, kv_tile: int, kv_split: int) -> Pair:
    out, lse2 = torch.empty(q.shape, dtype=q.dtype), torch.empty(q.shape[:2], dtype=torch.float32)
    LIBRARY.call(
        "attention_forward", q.contiguous(), k.contiguous(), v.contiguous(), segments, out, lse2,
        len(segments), q.shape[1], *k.shape[1:], kv_tile, kv_split, _log2_scale(scale),
    )  # fmt: skip
    return out, lse2


def delta(out: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    sums = torch.empty(out.shape[:2], dtype=torch.float32)
    LIBRARY.call("attention_delta", out.contiguous(), d_out.contiguous(), sums, sums.numel(), out.shape[2], op="attention.delta")
    return sums


def query_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, lse2: torch.Tensor, sums: torch.Tensor,
    segments: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    dq = torch.empty(q.shape, dtype=q.dtype)
    _gradient("attention_query_gradient", (q, k, v, d_out, lse2, sums, segments), (dq,), scale)
    return dq


def key_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, lse2: torch.Tensor, sums: torch.Tensor,
    segments: torch.Tensor, scale: float,
) -> Pair:  # fmt: skip
    dk, dv = torch.empty(k.shape, dtype=k.dtype), torch.empty(v.shape, dtype=v.dtype)
    _gradient("attention_key_gradient", (q, k, v, d_out, lse2, sums, segments), (dk, dv), scale)
    return dk, dv


def _gradient(function: str, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...], scale: float) -> None:
    q, k, segments = inputs[0], inputs[1], inputs[-1]
    LIBRARY.call(
        function, *(x.contiguous() for x in inputs), *outputs, len(segments), q.shape[1], *k.shape[1:],
        _log2_scale(scale), float(scale), op="attention.backward",
    )  # fmt: skip


def _whole(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """The segments of whole packed sequences, the same for queries and keys."""
    first, rows = cu_seqlens[:-1], cu_seqlens.diff()
    return torch.stack((first, rows, torch.zeros_like(first), first, rows), dim=1)


def require_offsets(op: str, name: str, offsets: torch.Tensor, tokens: int) -> None:
    if int(offsets[0]) != 0 or int(offsets[-1]) != tokens or bool((offsets.diff() < 0).any()):
        raise ValueError(f"{op}: {name} {offsets.tolist()} must ascend from 0 to {tokens}, the number of query rows")


@torch.library.custom_op("rlk::attention", mutates_args=(), device_types="cpu")
def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, kv_tile: int, kv_split: int
) -> Pair:
    require_offsets("attention", "cu_seqlens", cu_seqlens, q.shape[0])
    return forward(q, k, v, _whole(cu_seqlens), scale, kv_tile, kv_split)


@attention_with_lse.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, kv_tile: int, kv_split: int) -> Pair:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


@torch.library.custom_op("rlk::attention_backward", mutates_args=(), device_types="cpu")
def attention_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse2: torch.Tensor, d_out: torch.Tensor,
    cu_seqlens: torch.Tensor, scale: float,
) -> Triple:  # fmt: skip
    sums, segments = delta(out, d_out), _whole(cu_seqlens)
    dq = query_gradient(q, k, v, d_out, lse2, sums, segments, scale)
    return dq, *key_gradient(q, k, v, d_out, lse2, sums, segments, scale)


@attention_backward.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse2: torch.Tensor, d_out: torch.Tensor,
    cu_seqlens: torch.Tensor, scale: float,
) -> Triple:  # fmt: skip
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
    pages, kv_heads, page, _ = kv_cache.shape
    require_offsets("paged_attention", "query_start_loc", query_start_loc, q.shape[0])
    rows = query_start_loc.diff()
    if bool((seq_lens < rows).any()):
        raise ValueError(f"paged_attention: seq_lens {seq_lens.tolist()} must include the query rows {rows.tolist()}")
    needed = torch.where(rows > 0, (seq_lens + page - 1) // page, 0)
    if bool((needed > block_table.shape[1]).any()):
        raise ValueError(f"paged_attention: {int(needed.max())} pages are visible but block_table has {block_table.shape[1]} columns")
    visible = block_table[torch.arange(block_table.shape[1]) < needed[:, None]]
    if bool(((visible < 0) | (visible >= pages)).any()):
        raise IndexError(f"paged_attention: block_table names a visible page outside the cache of {pages} pages")
    out = torch.empty(q.shape, dtype=q.dtype)
    LIBRARY.call(
        "attention_paged", q.contiguous(), kv_cache[:1, :1, :1], block_table.contiguous(), query_start_loc.contiguous(),
        seq_lens.contiguous(), out, len(seq_lens), block_table.shape[1], q.shape[1], kv_heads, q.shape[2], page,
        *kv_cache.stride()[:3], kv_tile, kv_split, _log2_scale(scale), op="attention.paged",
    )  # fmt: skip
    return out


@paged_attention.register_fake
def _(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    scale: float, kv_tile: int, kv_split: int,
) -> torch.Tensor:  # fmt: skip
    return q.new_empty(q.shape)
