"""Triton backend of attention: implementations of the operators that cpu.py declares, for tensors on a GPU.

Offsets of packed sequences are checked once per tensor, outside a captured graph; nothing else is read on the host. What a step over pages
is told is taken at its word: a visible page outside the cache or the table gives NaN. Tiles are chosen by shape; all give the same bytes.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.launch import platform, processors
from rlk.kernels.attention import cpu
from rlk.kernels.attention.triton_backward import attention_delta, attention_key_gradient, attention_query_gradient
from rlk.kernels.attention.triton_forward import OWNED, PAGED, WHOLE, attention_forward, attention_join
from rlk.kernels.checked import check_once

SOURCE = TritonSource("attention")
LARGEST_TILE, LARGEST_DIM = 128, 256
WORKSPACE = 1 << 28  # most fp32 values of split states that are kept in memory; beyond it a program joins its own splits


class Tiles(NamedTuple):
    """States or queries and keys of one program, warps and pipeline stages."""

    m: int
    n: int
    warps: int
    stages: int


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


def run_forward(
    op: str, q: torch.Tensor, keys: Keys, segments: Segments, scale: float, kv_tile: int, kv_split: int, lse: bool,
    tiles: Tiles | None = None, programs: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out [T, Hq, D] and lse2 [T, Hq] (left unwritten unless ``lse``). tiles, programs: None for the choice by shape.

    programs: how many programs share the splits of a block of rows; one joins them itself.
    """
    (rows, heads, dim), q = q.shape, _heads(q)
    _require_size(op, kv_tile, dim)
    out, lse2 = q.new_empty(q.shape), q.new_empty((rows, heads), dtype=torch.float32)
    if not rows:
        return out, lse2
    group = heads // keys.heads
    tiles = tiles or forward_tiles(triton.cdiv(rows, segments.number) * group, kv_tile, dim)
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


def run_delta(out: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    out, d_out = _heads(out), _heads(d_out)
    rows, heads, dim = out.shape
    sums = out.new_empty((rows, heads), dtype=torch.float32)
    if rows:
        SOURCE.launch(
            attention_delta, (triton.cdiv(sums.numel(), 32),), out, d_out, sums, sums.numel(), out.stride(0), out.stride(1),
            d_out.stride(0), d_out.stride(1), op="attention.delta", HEADS=heads, DIM=dim, BLOCK_M=32,
            BLOCK_D=triton.next_power_of_2(dim),
        )  # fmt: skip
    return sums


def _backward(
    kernel: object, outputs: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...], segments: Segments, scale: float, tiles: Tiles,
    step: int,
) -> None:  # fmt: skip
    """inputs: q, k, v, d_out, lse2, delta. step: rows of the outputs that one program owns."""
    q, k, v, d_out = (_heads(x) for x in inputs[:4])
    lse2, sums = (x.contiguous() for x in inputs[4:])
    rows, dim, group = outputs[0].shape[0], q.shape[2], q.shape[1] // k.shape[1]
    _require_size("attention.backward", 16, dim)
    if not rows:
        return
    SOURCE.launch(
        kernel, (rows // step + segments.number, k.shape[1]), q, k, v, d_out, lse2, sums, *outputs, segments.table, segments.number, rows,
        scale * math.log2(math.e), scale, *(stride for x in (q, k, v, d_out) for stride in x.stride()[:2]), op="attention.backward",
        warps=tiles.warps, stages=tiles.stages, GROUP=group, DIM=dim, BLOCK_M=tiles.m, BLOCK_N=tiles.n,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), KIND=segments.kind,
    )  # fmt: skip


def run_query_gradient(inputs: tuple[torch.Tensor, ...], segments: Segments, scale: float, tiles: Tiles | None = None) -> torch.Tensor:
    q, k = inputs[:2]
    dq, group, tiles = q.new_empty(q.shape), q.shape[1] // k.shape[1], tiles or query_gradient_tiles(q.shape[2])
    tiles = tiles._replace(m=max(tiles.m, triton.next_power_of_2(group)))
    _backward(attention_query_gradient, (dq,), inputs, segments, scale, tiles, tiles.m // group)
    return dq


def run_key_gradient(inputs: tuple[torch.Tensor, ...], segments: Segments, scale: float, tiles: Tiles | None = None) -> cpu.Pair:
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


attention_with_lse = cpu.attention_with_lse
paged_attention = cpu.paged_attention


@attention_with_lse.register_kernel("cuda")
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
    inputs, segments = (q, k, v, d_out, lse2, run_delta(out, d_out)), whole(cu_seqlens)
    return run_query_gradient(inputs, segments, scale), *run_key_gradient(inputs, segments, scale)


@paged_attention.register_kernel("cuda")
def run_paged(
    q: torch.Tensor, kv_cache: torch.Tensor, block_table: torch.Tensor, query_start_loc: torch.Tensor, seq_lens: torch.Tensor,
    scale: float, kv_tile: int, kv_split: int,
) -> torch.Tensor:  # fmt: skip
    pages, kv_heads, page, _ = kv_cache.shape
    k, v = kv_cache[..., : q.shape[2]], kv_cache[..., q.shape[2] :]
    page_stride, head_stride, slot_stride, _ = kv_cache.stride()
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    strides = (slot_stride, head_stride, slot_stride, head_stride, page_stride)
    keys = Keys(k, v, kv_heads, strides, table.shape[1] * page, seq_lens.contiguous(), table, pages, page)
    segments = Segments(query_start_loc.contiguous(), len(seq_lens), PAGED.value)
    return run_forward("attention.paged", q, keys, segments, scale, kv_tile, kv_split, False)[0]


def examples() -> None:
    """Calls for the ahead-of-time harness: the heads of Qwen3-8B; prefill and its gradients, and a decode step over pages."""
    with torch.device("meta"):
        make = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype)
        q, k, offsets = make(4096, 32, 128), make(4096, 8, 128), make(3, dtype=torch.int64)
        out, lse2 = run_attention(q, k, k, offsets, 128**-0.5, 64, 1024)
        run_backward(q, k, k, out, lse2, q, offsets, 128**-0.5)
        cache, table = make(1024, 8, 16, 256), make(2, 512, dtype=torch.int32)
        run_paged(make(2, 32, 128), cache, table, offsets, offsets[:2], 128**-0.5, 64, 1024)
