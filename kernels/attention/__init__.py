"""attention: causal grouped-query attention over packed sequences (training) and over a paged KV cache (prefill and decode)."""

from __future__ import annotations

import torch

from rlk.kernels._triton import from_triton
from rlk.kernels.attention import cpu, vendor
from rlk.kernels.dispatch import Backends, select

_ATTENTION: Backends = {
    "cpu": cpu.attention_with_lse,
    "triton": from_triton("attention", "attention_with_lse"),
    "vendor": vendor.attention_with_lse,
}
_PAGED: Backends = {"cpu": cpu.paged_attention, "triton": from_triton("attention", "paged_attention"), "vendor": vendor.paged_attention}


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, *,
    scale: float, kv_tile: int, kv_split: int, backend: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of packed sequences: the output of :func:`attention_with_lse`, differentiable in q, k and v.

    Gradients are bf16, each rounded once. P = exp2(t − LSE₂), dS = P·(dP − Σ dO·O) with the sum by row tree over bf16 O; P and dS are
    rounded to bf16. dQ: one fp32 accumulator over keys in groups of 16 from position 0. dK, dV: one accumulator each, query heads of the
    group ascending, then queries in groups of 16 counted from position 0. The finished fp32 dQ and dK are multiplied by scale.
    Source: Dao et al. 2022 (FlashAttention), algorithm 4. Ranks that own a part of the queries or keys: ``rlk.kernels.attention.context``.
    """
    return attention_with_lse(q, k, v, cu_seqlens, scale=scale, kv_tile=kv_tile, kv_split=kv_split, backend=backend)[0]


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, *,
    scale: float, kv_tile: int, kv_split: int, backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Causal attention of packed sequences and its base-2 log-sum-exp.

    q: [T, Hq, D], k, v: [T, Hk, D], bf16, Hk divides Hq; cu_seqlens: [S+1] int64, ascending from 0 to T. Returns out [T, Hq, D] bf16 and
    lse2 [T, Hq] fp32 = m + log2(l), not differentiable.
    Order (contract, attention forward): t = (q·k)·fp32(scale·log2 e), q·k in groups of 16 over D; tiles of kv_tile keys ascending from
    position 0 with an online softmax in base 2 whose P is bf16 and whose sums over keys go in groups of 16; a fresh state at every
    multiple of kv_split keys (0: one state), states merged ascending without FMA; out = bf16(o/l).
    Raises ValueError on a wrong shape, dtype, offset, tile or split, BackendUnavailable for a backend that cannot run here. A GPU holds
    tiles of at most 128 keys and heads of at most 256; offsets are checked once per tensor there, and not while a graph is captured.
    Backend "vendor" (FlashAttention 3, CUDA only) is the family vendor-one-split: it wants kv_split = 0, does not read kv_tile, adds in
    its library's order and raises VendorNotCertified if training, prefill and decode differ in it. lse2 is there the library's natural
    log-sum-exp times fp32(log2 e), and gradients are computed from it and from the library's output in the order of :func:`attention`.
    Keys, values and scores must be finite: the library multiplies what it masks inside a tile by 0.
    """
    require_packed("attention", q, k, v)
    require_tiles("attention", kv_tile, kv_split)
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"attention: k and v have {k.shape[0]} rows and q has {q.shape[0]}: packed sequences need one key per query")
    if cu_seqlens.dtype != torch.int64 or cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2:
        raise ValueError(f"attention: cu_seqlens {tuple(cu_seqlens.shape)} {cu_seqlens.dtype} must be int64 [sequences + 1]")
    run = select("attention", _ATTENTION, backend, q.device)
    out, lse2 = run(q, k, v, cu_seqlens, scale, kv_tile, kv_split)
    return out, lse2


def paged_attention(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, *,
    scale: float, kv_tile: int, kv_split: int, backend: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of the last rows of each sequence over a paged KV cache; bytes equal :func:`attention` on the same tokens.

    q: [T, Hq, D] bf16; kv_cache: [blocks, Hk, page, 2·D] bf16, K then V, last dimension contiguous, the others of any stride;
    block_table: [S, max_blocks] int32; query_start_loc: [S+1] int64, ascending from 0 to T; seq_lens: [S] int64 including the query rows
    (both int32 as well on a GPU).
    Returns [T, Hq, D] bf16. Table entries and slots beyond a sequence's length are never read. Same order as :func:`attention_with_lse`.
    Raises ValueError on a wrong shape, dtype, offset, tile or split, IndexError for a visible page outside the cache,
    BackendUnavailable for a backend that cannot run here. On a GPU offsets, lengths and pages are not read before the launch, so that the
    host need not wait: rows that see a page outside the cache or the table are NaN there with backend "triton"; backend "vendor"
    (see :func:`attention_with_lse`) trusts the table, and wants every stride and the address of the cache to be multiples of 16 bytes.
    """
    op = "paged_attention"
    if kv_cache.dtype != torch.bfloat16 or kv_cache.ndim != 4 or kv_cache.shape[3] != 2 * q.shape[-1] or kv_cache.stride(3) != 1:
        raise ValueError(f"{op}: kv_cache {tuple(kv_cache.shape)} {kv_cache.dtype} must be bf16 [blocks, Hk, page, {2 * q.shape[-1]}]")
    require_queries(op, q, kv_cache.shape[1])
    require_tiles(op, kv_tile, kv_split)
    sequences = block_table.shape[0]
    if block_table.dtype != torch.int32 or block_table.ndim != 2:
        raise ValueError(f"{op}: block_table {tuple(block_table.shape)} {block_table.dtype} must be int32 [sequences, pages]")
    for name, tensor, size in (("query_start_loc", query_start_loc, sequences + 1), ("seq_lens", seq_lens, sequences)):
        integers = tensor.dtype == torch.int64 or (tensor.dtype == torch.int32 and tensor.is_cuda)
        if not integers or tensor.shape != (size,):
            raise ValueError(f"{op}: {name} {tuple(tensor.shape)} {tensor.dtype} must be int64 [{size}]")
    run = select("attention.paged", _PAGED, backend, q.device)
    result: torch.Tensor = run(q, kv_cache, block_table, query_start_loc, seq_lens, scale, kv_tile, kv_split)
    return result


def require_queries(op: str, q: torch.Tensor, kv_heads: int) -> None:
    """Raise ValueError unless q is bf16 [T, Hq, D] whose heads split evenly over ``kv_heads``."""
    if q.dtype != torch.bfloat16 or q.ndim != 3 or kv_heads < 1 or q.shape[1] % kv_heads:
        raise ValueError(f"{op}: q {tuple(q.shape)} {q.dtype} must be bf16 [T, Hq, D] with Hq a multiple of {kv_heads} kv heads")


def require_packed(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Raise ValueError unless k and v are bf16 [rows, Hk, D] that fit q."""
    if k.dtype != torch.bfloat16 or v.dtype != torch.bfloat16 or k.ndim != 3 or k.shape != v.shape or k.shape[2] != q.shape[-1]:
        raise ValueError(f"{op}: k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype} must be bf16 [rows, Hk, {q.shape[-1]}]")
    require_queries(op, q, k.shape[1])


def require_tiles(op: str, kv_tile: int, kv_split: int) -> None:
    """Raise ValueError unless 16 | kv_tile | kv_split (kv_split 0: one split)."""
    if kv_tile <= 0 or kv_tile % 16:
        raise ValueError(f"{op}: kv_tile={kv_tile} must be a positive multiple of 16")
    if kv_split < 0 or kv_split % kv_tile:
        raise ValueError(f"{op}: kv_split={kv_split} must be 0 or a multiple of kv_tile={kv_tile}")
