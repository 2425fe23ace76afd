"""Vendor backend of attention: FlashAttention 3 with one split, the family ``vendor-one-split``.

The library's own order holds: its tile, its fused multiply-adds. That training, chunked prefill and decode agree in it to the byte is
certified per kind of call before the first result is used (see ``vendor_certificate``). Gradients are the Triton backend's, from the
library's output and from LSE₂ = its natural log-sum-exp times fp32(log2 e), one fp32 product.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from rlk.kernels.attention import cpu
from rlk.kernels.attention.vendor_certificate import Calls, certify
from rlk.kernels.attention.vendor_library import BLOCK, LIBRARY, MISSING
from rlk.kernels.checked import check_once, remembered
from rlk.kernels.dispatch import BackendUnavailable, record

_ALIGNED = 8
"""Elements of bf16 that every stride must be a multiple of: 16 bytes."""


class Placement(NamedTuple):
    """Where the keys of each sequence go in a copy, for the library that starts and lengths are int32.

    rows: [S, 3] int64, first row, rows and first block of the copy; blocks: of the whole copy; q_starts, k_starts: [S+1]; lengths: [S].
    """

    rows: torch.Tensor
    blocks: int
    q_starts: torch.Tensor
    k_starts: torch.Tensor
    lengths: torch.Tensor


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float) -> cpu.Pair:
    """Packed sequences, certified or not: out [T, Hq, D] and lse2 [T, Hq]. Keys of several sequences are copied, those of one are not."""
    if cu_seqlens.numel() == 2 and _aligned(k) and _aligned(v):
        starts = cu_seqlens.int()
        return _run(q, k, v, starts, starts, None, scale)
    place = lambda: place_whole(cu_seqlens, q.shape[0])
    capturing = cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing()
    return _placed(q, k, v, place() if capturing else remembered(cu_seqlens, ("vendor", q.shape[0]), place), scale)


def owned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, scale: float) -> cpu.Pair:
    """Owned queries over gathered keys, certified or not; segments: [n, 5] on the host, rows of ``context.Segment``."""
    return _placed(q, k, v, place_owned(segments, q.device), scale)


def paged(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, scale: float
) -> torch.Tensor:
    """The last rows of sequences in pages, certified or not: out [T, Hq, D]."""
    if not q.shape[0]:
        return torch.empty_like(q)
    dim, (sequences, width) = q.shape[2], block_table.shape
    pages = kv_cache.transpose(1, 2)
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    most_rows = q.shape[0] - sequences + 1  # unless a sequence has no row: then the library is told too little, which it may be
    out, _ = LIBRARY.forward(
        _readable(q), pages[..., :dim], pages[..., dim:], scale=scale, q_starts=query_start_loc.int(), most_rows=most_rows,
        most_keys=width * kv_cache.shape[2], lengths=seq_lens.int(), table=table,
    )  # fmt: skip
    return out


CALLS = Calls(whole, owned, paged)


def place_whole(cu_seqlens: torch.Tensor, rows: int) -> Placement:
    """Of packed sequences of ``rows`` rows in all. One starts at the block of its first row plus its number: that leaves room for its rows
    without reading a length on the host."""
    first, count = cu_seqlens[:-1], cu_seqlens.numel() - 1
    blocks = rows // BLOCK + count
    block = cu_seqlens // BLOCK + torch.arange(count + 1, device=cu_seqlens.device)
    lengths = cu_seqlens.diff()
    return Placement(torch.stack((first, lengths, block[:-1]), dim=1), blocks, cu_seqlens.int(), (block * BLOCK).int(), lengths.int())


def place_owned(segments: torch.Tensor, device: torch.device) -> Placement:
    """Of the keys that the queries of each segment see."""
    _, rows, position, first, _ = segments.unbind(1)
    visible = torch.where(rows > 0, position + rows, 0)
    edges = lambda counts: torch.tensor([0, *itertools.accumulate(counts.tolist())])
    starts, blocks = edges(rows), edges((visible + BLOCK - 1) // BLOCK)
    places = torch.stack((first, visible, blocks[:-1]), dim=1)
    on = lambda x: x.to(device)
    return Placement(on(places), int(blocks[-1]), *(on(x.int()) for x in (starts, blocks * BLOCK, visible)))


def _placed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: Placement, scale: float) -> cpu.Pair:
    place_rows = importlib.import_module("rlk.kernels.attention.vendor_rows").place_rows
    k, v = place_rows(k, v, at.rows, at.blocks)
    return _run(q, k, v, at.q_starts, at.k_starts, at.lengths, scale)


def _run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, k_starts: torch.Tensor, lengths: torch.Tensor | None,
    scale: float,
) -> cpu.Pair:  # fmt: skip
    lse2 = q.new_empty(q.shape[:2], dtype=torch.float32)
    if not q.shape[0]:
        return torch.empty_like(q), lse2
    out, lse = LIBRARY.forward(
        _readable(q), k, v, scale=scale, q_starts=starts, k_starts=k_starts, lengths=lengths, most_rows=q.shape[0], most_keys=k.shape[0]
    )
    return out, torch.mul(lse.T, math.log2(math.e), out=lse2)


def _aligned(x: torch.Tensor) -> bool:
    strides: Sequence[int] = x.stride()
    return strides[-1] == 1 and all(s % _ALIGNED == 0 for s in strides[:-1]) and x.data_ptr() % 16 == 0


def _readable(x: torch.Tensor) -> torch.Tensor:
    return x if _aligned(x) else x.clone(memory_format=torch.contiguous_format)


def _require(op: str, q: torch.Tensor, kv_split: int) -> None:
    if not LIBRARY.available:
        raise BackendUnavailable(f"{op}: {MISSING}")
    if kv_split:
        raise ValueError(f"{op}: backend 'vendor' has one split: use kv_split=0 (attention_family vendor-one-split), not {kv_split}")
    if q.shape[2] % _ALIGNED:
        raise BackendUnavailable(f"{op}: backend 'vendor' needs heads of a multiple of {_ALIGNED}, not {q.shape[2]}: use backend 'triton'")


def certify_pages(q_heads: int, kv_heads: int, dim: int, page: int, device: torch.device) -> None:
    """Certify attention over pages before its first call, which may be a graph capture; raises what :func:`paged_attention` would."""
    q = torch.empty(0, q_heads, dim, dtype=torch.bfloat16, device=device)
    _require("paged_attention", q, 0)
    certify(q, kv_heads, page, CALLS)


@torch.library.custom_op("rlk::attention_vendor", mutates_args=(), device_types="cuda")
def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, kv_tile: int, kv_split: int
) -> cpu.Pair:
    _require("attention", q, kv_split)
    check_once(cu_seqlens, q.shape[0], lambda: cpu.require_offsets("attention", "cu_seqlens", cu_seqlens, q.shape[0]))
    certify(q, k.shape[1], None, CALLS)
    result = whole(q, k, v, cu_seqlens, scale)
    record("attention", "vendor", LIBRARY.kernel_id)
    return result


@attention_with_lse.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, kv_tile: int, kv_split: int) -> cpu.Pair:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens, ctx.scale, _, _ = inputs
    out, lse2 = output
    ctx.mark_non_differentiable(lse2)
    ctx.save_for_backward(q, k, v, out, lse2, cu_seqlens)


def _backward(ctx, d_out, _):  # type: ignore[no-untyped-def]
    importlib.import_module("rlk.kernels.attention.triton")  # gives rlk::attention_backward its kernel for a card
    q, k, v, out, lse2, cu_seqlens = ctx.saved_tensors
    return *torch.ops.rlk.attention_backward(q, k, v, out, lse2, d_out, cu_seqlens, ctx.scale), None, None, None, None


attention_with_lse.register_autograd(_backward, setup_context=_setup)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, scale: float, kv_tile: int, kv_split: int
) -> cpu.Pair:
    _require("attention", q, kv_split)
    certify(q, k.shape[1], None, CALLS)
    result = owned(q, k, v, segments, scale)
    record("attention", "vendor", LIBRARY.kernel_id)
    return result


def paged_attention(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    scale: float, kv_tile: int, kv_split: int,
) -> torch.Tensor:  # fmt: skip
    _require("paged_attention", q, kv_split)
    if not _aligned(kv_cache):
        raise ValueError(
            f"paged_attention: backend 'vendor' cannot read kv_cache with strides {kv_cache.stride()} at {kv_cache.data_ptr() % 16} bytes "
            f"past a multiple of 16: lay it out as [blocks, Hk, page, 2·D] or [blocks, page, Hk, 2·D], contiguous, and hand in a view"
        )
    certify(q, kv_cache.shape[1], kv_cache.shape[2], CALLS)
    out = paged(q, kv_cache, block_table, query_start_loc, seq_lens, scale)
    record("attention.paged", "vendor", LIBRARY.kernel_id)
    return out
