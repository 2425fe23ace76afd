"""Triton backend of attention: implementations of the operators that cpu.py declares, for tensors on a GPU.

Offsets of packed sequences are checked once per tensor, outside a captured graph; nothing else is read on the host. What a step over pages
is told is taken at its word: a visible page outside the cache or the table gives NaN. Tiles are chosen by shape; all give the same bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from rlk.kernels import overlap
from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.launch import platform, processors
from rlk.kernels.attention import cpu, sm90
from rlk.kernels.attention.counters import COUNTERS, counters
from rlk.kernels.attention.triton_backward import attention_delta, attention_key_gradient, attention_query_gradient
from rlk.kernels.attention.triton_decode import attention_decode
from rlk.kernels.attention.triton_forward import OWNED, PAGED, WHOLE, attention_forward, attention_join
from rlk.kernels.checked import check_once

SOURCE = TritonSource("attention")
LARGEST_TILE, LARGEST_DIM = 128, 256
RESIDENT = 2  # programs of a decode step that a multiprocessor holds at once
WORKSPACE = 1 << 28  # most fp32 values of split states that are kept in memory; beyond it a program joins its own splits
STEP_WORKSPACE = 1 << 25  # the same of a decode step: graphs of steps keep theirs


class Tiles(NamedTuple):
    """States or queries and keys of one program, warps and pipeline stages."""

    m: int
    n: int
    warps: int
    stages: int


def decode_tiles(kv_tile: int, dim: int) -> Tiles:
    """For steps of one row a sequence: the query heads of a KV head fill part of one matrix instruction."""
    deep = platform() == "cuda" and kv_tile * dim <= 64 * 128
    return Tiles(16, kv_tile, 4, 3 if deep else 2 if platform() == "cuda" else 1)


def forward_tiles(states: int, kv_tile: int, dim: int) -> Tiles:
    """For ``states`` positions times query heads per sequence and KV head."""
    cuda, wide = platform() == "cuda", dim > 128 or kv_tile * dim > 128 * 128
    if states <= 16:
        return Tiles(16, kv_tile, 4, 2 if cuda and not wide else 1)
    if states <= 64 or wide:
        return Tiles(64, kv_tile, 4, 2 if cuda and not wide else 1)
    return Tiles(128, kv_tile, 8, 3 if kv_tile <= 64 else 2) if cuda else Tiles(128, kv_tile, 4, 1)


def query_gradient_tiles(dim: int) -> Tiles:
    if dim > 128:
        return Tiles(64, 32, 4, 1)
    return Tiles(64, 64, 4, 2 if platform() == "cuda" else 1)


def key_gradient_tiles(dim: int) -> Tiles:
    if dim > 128:
        return Tiles(32, 64, 8, 1) if platform() == "cuda" else Tiles(16, 32, 4, 1)
    return Tiles(32, 64, 4, 2 if platform() == "cuda" else 1)


class Segments(NamedTuple):
    """Which rows belong together: a table in memory, how many rows of it, and how triton_forward.describe reads it."""

    table: torch.Tensor
    number: int
    kind: int

    def of_rows(self) -> tuple[torch.Tensor, int, bool]:
        """The table, its rows, and whether they are ranks' parts; not of pages."""
        return self.table, self.number, self.kind == OWNED.value


def owned(segments: torch.Tensor, device: torch.device) -> Segments:
    return Segments(segments.to(device), len(segments), OWNED.value)


def whole(cu_seqlens: torch.Tensor) -> Segments:
    return Segments(cu_seqlens.contiguous(), cu_seqlens.numel() - 1, WHOLE.value)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """x [rows, heads, D] with contiguous heads; other strides are taken as they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _require_size(op: str, kv_tile: int, dim: int) -> None:
    if kv_tile > LARGEST_TILE or dim > LARGEST_DIM:
        raise ValueError(f"{op}: kv_tile={kv_tile} and head dimension {dim} must be at most {LARGEST_TILE} and {LARGEST_DIM} on a GPU")


class Keys(NamedTuple):
    """Keys and values, packed or in pages: row, head and page strides in elements, most keys a sequence can have, page table."""

    k: torch.Tensor
    v: torch.Tensor
    heads: int
    strides: tuple[int, int, int, int, int]  # k row, k head, v row, v head, page
    longest: int
    lengths: torch.Tensor | None = None
    table: torch.Tensor | None = None
    pages: int = 0
    page: int = 1


def packed(k: torch.Tensor, v: torch.Tensor) -> Keys:
    k, v = _heads(k), _heads(v)
    return Keys(k, v, k.shape[1], (k.stride(0), k.stride(1), v.stride(0), v.stride(1), 0), k.shape[0])


def paged(kv_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor) -> Keys:
    """Of a cache [blocks, Hk, page, 2·D] as in paged_attention."""
    pages, heads, page, width = kv_cache.shape
    page_stride, head_stride, slot_stride, _ = kv_cache.stride()
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    strides = (slot_stride, head_stride, slot_stride, head_stride, page_stride)
    k, v = kv_cache.split(width // 2, dim=3)
    return Keys(k, v, heads, strides, table.shape[1] * page, seq_lens.contiguous(), table, pages, page)


def run_forward(
    op: str, q: torch.Tensor, keys: Keys, segments: Segments, scale: float, kv_tile: int, kv_split: int, lse: bool,
    tiles: Tiles | None = None, programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out [T, Hq, D] and lse2 [T, Hq] (left unwritten unless ``lse`` or a Hopper card's own kernel runs).

    tiles, programs: None for the choice by shape; tiles asks for the kernel that every card runs. programs: how many share the splits of a
    block of rows; one joins them itself.
    """
    (rows, heads, dim), q = q.shape, _heads(q)
    _require_size(op, kv_tile, dim)
    if (
        tiles is None
        and kv_tile == sm90.TILE
        and segments.kind != PAGED.value
        and sm90.takes(heads, keys.heads, segments.table, q, keys.k, keys.v)
    ):
        return sm90.forward(op, q, keys.k, keys.v, *segments.of_rows(), scale, kv_split)
    out, lse2 = q.new_empty(q.shape), q.new_empty((rows, heads), dtype=torch.float32)
    if not rows:
        return out, lse2
    group = heads // keys.heads
    states = triton.cdiv(rows, segments.number) * group
    tiles = tiles or forward_tiles(states, kv_tile, dim)
    block_m = max(tiles.m, triton.next_power_of_2(group))
    blocks = rows // (block_m // group) + segments.number
    splits = triton.cdiv(keys.longest, kv_split) if kv_split else 1
    if programs is None:
        programs = triton.cdiv((4 if tiles.m == 16 else 1) * processors(q.device), blocks * keys.heads)
    programs = min(programs, splits)
    fold = programs == 1 or rows * heads * splits * dim > WORKSPACE
    states = (0 if fold else rows, heads, splits)
    part_o, part_m, part_l = (q.new_empty((*states, *last), dtype=torch.float32) for last in ((dim,), (), ()))
    lengths, table = (segments.table if x is None else x for x in (keys.lengths, keys.table))
    block_d = max(16, triton.next_power_of_2(dim))
    SOURCE.launch(
        attention_forward, (blocks, keys.heads, 1 if fold else programs),
        q, keys.k, keys.v, out, lse2, part_o, part_m, part_l, segments.table, lengths, table, segments.number, rows,
        scale * math.log2(math.e), q.stride(0), q.stride(1), *keys.strides, table.stride(0), keys.longest, keys.pages, splits,
        1 if fold else programs,
        op=op, warps=tiles.warps, stages=tiles.stages, GROUP=group, DIM=dim, BLOCK_M=block_m, BLOCK_D=block_d, KV_TILE=kv_tile,
        KV_SPLIT=kv_split, PAGE=keys.page, KIND=segments.kind, FOLD=fold, STORE_LSE=lse,
    )  # fmt: skip
    if not fold:
        SOURCE.launch(
            attention_join, (rows, keys.heads), part_o, part_m, part_l, out, lse2, segments.table, lengths, segments.number, rows,
            splits, op=None, GROUP=group, DIM=dim, BLOCK_H=triton.next_power_of_2(group), BLOCK_D=block_d, KV_SPLIT=kv_split,
            KIND=segments.kind, STORE_LSE=lse,
        )  # fmt: skip
    return out, lse2


def run_decode(
    q: torch.Tensor, keys: Keys, segments: Segments, scale: float, kv_tile: int, kv_split: int, tiles: Tiles | None = None,
    programs: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """out [T, Hq, D] of a step over pages with at most as many rows as sequences.

    programs: how many share the splits of all sequences, for each KV head.
    """
    (rows, heads, dim), q = q.shape, _heads(q)
    _require_size("attention.paged", kv_tile, dim)
    out = q.new_empty((rows, heads, dim))
    if not rows:
        return out
    assert keys.lengths is not None
    assert keys.table is not None
    group, splits = heads // keys.heads, triton.cdiv(keys.longest, kv_split) if kv_split else 1
    tiles = tiles or decode_tiles(kv_tile, dim)
    if programs is None:  # all that the card holds at once, a whole number of times, and one for each sequence
        at_once = max(1, RESIDENT * processors(q.device) // keys.heads)
        programs = min(at_once * triton.cdiv(segments.number, at_once), segments.number * splits)
    states = rows * heads * splits
    fold = splits == 1 or states * dim > STEP_WORKSPACE or rows * keys.heads > COUNTERS
    part, arrived = (out, out) if fold else (q.new_empty(states * (dim + 2), dtype=torch.float32), counters(q.device))
    SOURCE.launch(
        attention_decode, (segments.number if fold else programs, keys.heads),
        q, keys.k, keys.v, out, part, arrived, segments.table, keys.lengths, keys.table, segments.number, rows, scale * math.log2(math.e),
        q.stride(0), q.stride(1), *keys.strides, keys.table.stride(0), keys.longest, keys.pages, splits,
        op="attention.paged", warps=tiles.warps, stages=tiles.stages, GROUP=group, DIM=dim,
        BLOCK_M=max(tiles.m, triton.next_power_of_2(group)), BLOCK_D=max(16, triton.next_power_of_2(dim)), KV_TILE=kv_tile,
        KV_SPLIT=kv_split, PAGE=keys.page, FOLD=fold, SEARCHED=32 if segments.number <= 32 else 256, **overlap.constants(),
    )  # fmt: skip
    return out


def run_delta(out: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    sums = out.new_empty(out.shape[:2], dtype=torch.float32)
    _delta(out, d_out, sums, sums, sums)
    return sums


def run_sums(out: torch.Tensor, d_out: torch.Tensor, lse2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """lse2 and delta [T, Hq], the values of one head contiguous, as the loops over queries read them."""
    copy, sums = (x.t() for x in out.new_empty((2, *reversed(out.shape[:2])), dtype=torch.float32).unbind())
    _delta(out, d_out, lse2.contiguous(), sums, copy)
    return copy, sums


def _delta(out: torch.Tensor, d_out: torch.Tensor, lse2: torch.Tensor, sums: torch.Tensor, copy: torch.Tensor) -> None:
    out, d_out = _heads(out), _heads(d_out)
    _, heads, dim = out.shape
    if sums.numel():
        SOURCE.launch(
            attention_delta, (triton.cdiv(sums.numel(), 32),), out, d_out, lse2, sums, copy, sums.numel(), out.stride(0), out.stride(1),
            d_out.stride(0), d_out.stride(1), sums.stride(0), sums.stride(1), op="attention.delta", HEADS=heads, DIM=dim, BLOCK_M=32,
            BLOCK_D=triton.next_power_of_2(dim), COPY=copy is not sums,
        )  # fmt: skip


def _backward(
    kernel: object, outputs: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...], segments: Segments, scale: float, tiles: Tiles,
    step: int,
) -> None:  # fmt: skip
    """inputs: q, k, v, d_out, lse2, delta. step: rows of the outputs that one program owns."""
    q, k, v, d_out = (_heads(x) for x in inputs[:4])
    lse2, sums = inputs[4:]
    if lse2.stride() != sums.stride():
        lse2, sums = lse2.contiguous(), sums.contiguous()
    rows, dim, group = outputs[0].shape[0], q.shape[2], q.shape[1] // k.shape[1]
    _require_size("attention.backward", 16, dim)
    if not rows:
        return
    SOURCE.launch(
        kernel, (rows // step + segments.number, k.shape[1]), q, k, v, d_out, lse2, sums, *outputs, segments.table, segments.number, rows,
        scale * math.log2(math.e), scale, *(stride for x in (q, k, v, d_out, sums) for stride in x.stride()[:2]),
        op="attention.backward", warps=tiles.warps, stages=tiles.stages, GROUP=group, DIM=dim, BLOCK_M=tiles.m, BLOCK_N=tiles.n,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), KIND=segments.kind,
    )  # fmt: skip


def _on_hopper(inputs: tuple[torch.Tensor, ...], segments: Segments) -> tuple[torch.Tensor, ...] | None:
    """The inputs as sm90's gradients want them, None where those do not run."""
    q, k, v, d_out, lse2, sums = inputs
    rows = tuple(_heads(x) for x in (q, k, v, d_out))
    if not sm90.takes(q.shape[1], k.shape[1], segments.table, *rows):
        return None
    return (*rows, lse2, sums) if lse2.stride() == sums.stride() else (*rows, lse2.contiguous(), sums.contiguous())


def run_query_gradient(inputs: tuple[torch.Tensor, ...], segments: Segments, scale: float, tiles: Tiles | None = None) -> torch.Tensor:
    """dq; tiles asks for the kernel that every card runs."""
    if tiles is None and (ready := _on_hopper(inputs, segments)):
        return sm90.query_gradient("attention.backward", ready, *segments.of_rows(), scale)
    q, k = inputs[:2]
    dq, group, tiles = q.new_empty(q.shape), q.shape[1] // k.shape[1], tiles or query_gradient_tiles(q.shape[2])
    tiles = tiles._replace(m=max(tiles.m, triton.next_power_of_2(group)))
    _backward(attention_query_gradient, (dq,), inputs, segments, scale, tiles, tiles.m // group)
    return dq


def run_key_gradient(inputs: tuple[torch.Tensor, ...], segments: Segments, scale: float, tiles: Tiles | None = None) -> cpu.Pair:
    """dk and dv; tiles asks for the kernel that every card runs."""
    if tiles is None and (ready := _on_hopper(inputs, segments)):
        return sm90.key_gradient("attention.backward", ready, *segments.of_rows(), scale)
    q, k = inputs[:2]
    dk, dv, tiles = k.new_empty(k.shape), k.new_empty(k.shape), tiles or key_gradient_tiles(q.shape[2])
    _backward(attention_key_gradient, (dk, dv), inputs, segments, scale, tiles, tiles.n)
    return dk, dv


# The functions of cpu.py that rlk.kernels.attention.context calls, with the same arguments.


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, scale: float, kv_tile: int, kv_split: int
) -> cpu.Pair:
    return run_forward("attention", q, packed(k, v), owned(segments, q.device), scale, kv_tile, kv_split, True)


delta = run_delta


def query_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, lse2: torch.Tensor, sums: torch.Tensor,
    segments: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    return run_query_gradient((q, k, v, d_out, lse2, sums), owned(segments, q.device), scale)


def key_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, lse2: torch.Tensor, sums: torch.Tensor,
    segments: torch.Tensor, scale: float,
) -> cpu.Pair:  # fmt: skip
    return run_key_gradient((q, k, v, d_out, lse2, sums), owned(segments, q.device), scale)


# Called as they are: an operator of torch.library around them would take the host longer than they do.


def run_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, kv_tile: int, kv_split: int
) -> cpu.Pair:
    if cu_seqlens.is_cuda:
        check_once(cu_seqlens, q.shape[0], lambda: cpu.require_offsets("attention", "cu_seqlens", cu_seqlens, q.shape[0]))
    return run_forward("attention", q, packed(k, v), whole(cu_seqlens), scale, kv_tile, kv_split, True)


@cpu.attention_backward.register_kernel("cuda")
def run_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse2: torch.Tensor, d_out: torch.Tensor,
    cu_seqlens: torch.Tensor, scale: float,
) -> cpu.Triple:  # fmt: skip
    inputs, segments = (q, k, v, d_out, *run_sums(out, d_out, lse2)), whole(cu_seqlens)
    return run_query_gradient(inputs, segments, scale), *run_key_gradient(inputs, segments, scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, kv_tile: int, kv_split: int
    ) -> cpu.Pair:
        out, lse2 = run_attention(q, k, v, cu_seqlens, scale, kv_tile, kv_split)
        ctx.mark_non_differentiable(lse2)
        ctx.save_for_backward(q, k, v, out, lse2, cu_seqlens)
        ctx.scale = scale
        return out, lse2

    @staticmethod
    def backward(ctx, d_out, _):  # type: ignore[no-untyped-def]
        q, k, v, out, lse2, cu_seqlens = ctx.saved_tensors
        return *run_backward(q, k, v, out, lse2, d_out, cu_seqlens, ctx.scale), None, None, None, None


def attention_with_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, scale: float, kv_tile: int, kv_split: int
) -> cpu.Pair:
    out, lse2 = _Attention.apply(q, k, v, cu_seqlens, scale, kv_tile, kv_split)
    return out, lse2


def run_paged(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    scale: float, kv_tile: int, kv_split: int,
) -> torch.Tensor:  # fmt: skip
    keys = paged(kv_cache, block_table, seq_lens)
    segments = Segments(query_start_loc.contiguous(), len(seq_lens), PAGED.value)
    if q.shape[0] <= segments.number:
        return run_decode(q, keys, segments, scale, kv_tile, kv_split)
    return run_forward("attention.paged", q, keys, segments, scale, kv_tile, kv_split, False)[0]


paged_attention = run_paged


def examples() -> None:
    """Calls for the ahead-of-time harness: the heads of Qwen3-8B; prefill and its gradients, smaller heads, and steps over pages."""
    with torch.device("meta"):
        make = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype)
        offsets = lambda count: make(count, dtype=torch.int64)
        q, k = make(4096, 32, 128), make(4096, 8, 128)
        for tile in (64, 128):
            out, lse2 = run_attention(q, k, k, offsets(3), 128**-0.5, tile, 1024)
        run_backward(q, k, k, out, lse2, q, offsets(3), 128**-0.5)
        run_attention(q[..., :64], k[..., :64], k[..., :64], offsets(3), 64**-0.5, 64, 1024)
        cache, table = make(1024, 8, 16, 256), make(64, 512, dtype=torch.int32)
        for sequences in (2, 64):
            run_paged(q[:sequences], cache, table[:sequences], offsets(sequences + 1), offsets(sequences), 128**-0.5, 64, 1024)
        for rows in (16, 1024):
            run_paged(q[:rows], cache, table[:2], offsets(3), offsets(2), 128**-0.5, 64, 1024)
