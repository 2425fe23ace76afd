"""Triton backend of serving: one launch per step, the arithmetic of rms_norm and rope.

No slot, position or page is read by the host, so a graph can capture every launch. A slot outside the cache is not written. On Hopper a
kernel in CUDA C++ adds and normalises instead (``sm90``), whose bytes are the same.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk.kernels import overlap
from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.numerics import bf16, reciprocal_root, row_tree
from rlk.kernels.serving import sm90

SOURCE = TritonSource("serving")


@triton.jit
def _place(slots, token, capacity, page_stride, row_stride, PAGE: tl.constexpr):
    """Offset of the token's slot within a head of the cache, and whether the cache has that slot: [1] each."""
    slot = tl.load(slots + token + tl.arange(0, 1))
    known = (slot >= 0) & (slot < capacity)
    slot = tl.where(known, slot, 0)
    return slot // PAGE * page_stride + slot % PAGE * row_stride, known


@triton.jit(do_not_specialize=["capacity"])
def _store(
    key, value, cache, slots, capacity, key_token, key_head, value_token, value_head, page_stride, head_stride, row_stride,
    DIM: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, heads)."""
    token, head, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, BLOCK)
    place, known = _place(slots, token, capacity, page_stride, row_stride, PAGE)
    to = cache + place + head * head_stride + d
    inside = (d < DIM) & known
    tl.store(to, tl.load(key + token * key_token + head * key_head + d, mask=inside), mask=inside)
    tl.store(to + DIM, tl.load(value + token * value_token + head * value_head + d, mask=inside), mask=inside)


@triton.jit(do_not_specialize=["length", "capacity"])
def _rotate_into(
    qkv, q_gamma, k_gamma, positions, table, cache, slots, q, eps, length, capacity, token_stride, page_stride, head_stride, row_stride,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The g query heads and the key of one group of one token as rows 0 … g, in halves; the value is copied. Grid: (tokens, groups)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    DIM: tl.constexpr = 2 * HALF
    row, d = tl.arange(0, HEADS), tl.arange(0, HALF)
    is_key = row == GROUP
    inside = (row <= GROUP)[:, None] & (d < HALF)[None, :]
    source = qkv + token * token_stride + group * (GROUP + 2) * DIM
    at = source + row[:, None] * DIM + d[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    # The first level of the row tree adds the upper half of a head to its lower half.
    mean = tl.div_rn(row_tree(first * first + second * second), DIM * 1.0)
    scale = reciprocal_root(mean, eps)[:, None]
    q_weight = tl.load(q_gamma + d).to(tl.float32)[None, :]
    k_weight = tl.load(k_gamma + d).to(tl.float32)[None, :]
    q_weight2 = tl.load(q_gamma + HALF + d).to(tl.float32)[None, :]
    k_weight2 = tl.load(k_gamma + HALF + d).to(tl.float32)[None, :]
    first = bf16(bf16(first * scale) * tl.where(is_key[:, None], k_weight, q_weight))
    second = bf16(bf16(second * scale) * tl.where(is_key[:, None], k_weight2, q_weight2))
    position = tl.load(positions + token + tl.arange(0, 1))
    seen = (d < HALF) & (position >= 0) & (position < length)
    entry = table + position * HALF + d
    cos = tl.load(entry, mask=seen, other=float("nan"))[None, :]
    sin = tl.load(entry + length.to(tl.int64) * HALF, mask=seen, other=float("nan"))[None, :]
    low = (first * cos - second * sin).to(q.dtype.element_ty)
    high = (second * cos + first * sin).to(q.dtype.element_ty)
    is_query = (row < GROUP)[:, None] & (d < HALF)[None, :]
    to = q + (token * tl.num_programs(1) * GROUP + group * GROUP + row[:, None]) * DIM + d[None, :]
    tl.store(to, low, mask=is_query)
    tl.store(to + HALF, high, mask=is_query)
    place, known = _place(slots, token, capacity, page_stride, row_stride, PAGE)
    to = cache + (place + group * head_stride + d)[None, :] + row[:, None] * 0
    written = is_key[:, None] & ((d < HALF) & known)[None, :]
    tl.store(to, low, mask=written)
    tl.store(to + HALF, high, mask=written)
    e = tl.arange(0, DIM)
    value = tl.load(source + (GROUP + 1) * DIM + e)
    tl.store(cache + place + group * head_stride + DIM + e, value, mask=(e < DIM) & known)


@triton.jit
def _add_norm(
    x, y, gamma, total, normed, rows, eps, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """ROWS rows of both results. Grid: (blocks of rows,)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * WIDTH + column[None, :]
    value = bf16(tl.load(x + at, mask=inside, other=0.0).to(tl.float32) + tl.load(y + at, mask=inside, other=0.0).to(tl.float32))
    weight = tl.load(gamma + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
    scale = reciprocal_root(tl.div_rn(row_tree(value * value), WIDTH * 1.0), eps)
    scaled = bf16(value * scale[:, None])
    tl.store(normed + at, (scaled * weight[None, :]).to(normed.dtype.element_ty), mask=inside)


def store_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    (tokens, heads, dim), (blocks, _, page, _) = key.shape, kv_cache.shape
    SOURCE.launch(
        _store, (tokens, heads), key, value, kv_cache, slots, blocks * page, key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2),
        op="serving.store_kv", warps=1, DIM=dim, BLOCK=triton.next_power_of_2(dim), PAGE=page,
    )  # fmt: skip


def rotate_into_cache(
    qkv: torch.Tensor, q_gamma: torch.Tensor, k_gamma: torch.Tensor, eps: float, positions: torch.Tensor, table: torch.Tensor,
    kv_cache: torch.Tensor, slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    (blocks, groups, page, _), tokens, half = kv_cache.shape, qkv.shape[0], table.shape[2]
    each = qkv.shape[1] // (groups * 2 * half) - 2
    q = qkv.new_empty(tokens, groups * each, 2 * half)
    SOURCE.launch(
        _rotate_into, (tokens, groups), qkv, q_gamma, k_gamma, positions, table, kv_cache, slots, q, eps, table.shape[1], blocks * page,
        qkv.stride(0), kv_cache.stride(0), kv_cache.stride(1), kv_cache.stride(2),
        op=("qk_norm", "rope", "serving.store_kv"), warps=2, GROUP=each, HEADS=triton.next_power_of_2(each + 1), HALF=half, PAGE=page,
        **overlap.constants(),
    )  # fmt: skip
    return q


def add_rms_norm(x: torch.Tensor, y: torch.Tensor, gamma: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = x.contiguous(), y.contiguous()
    if sm90.takes(x, y, gamma):
        return sm90.add_rms_norm(x, y, gamma, eps)
    total, normed, (rows, width) = torch.empty_like(x), torch.empty_like(x), x.shape
    block = triton.next_power_of_2(width)
    each = max(1, 1024 // block)
    SOURCE.launch(
        _add_norm, (triton.cdiv(rows, each),), x, y, gamma, total, normed, rows, eps, op="rms_norm",
        warps=min(16, max(1, each * block // 2048)), WIDTH=width, ROWS=each, BLOCK=block, **overlap.constants(),
    )  # fmt: skip
    return total, normed


def examples() -> None:
    """Calls for the ahead-of-time harness: a layer of Qwen3-8B over pages of 16."""
    with torch.device("meta"):
        make = lambda *shape, dtype=torch.bfloat16: torch.empty(*shape, dtype=dtype)
        cache, slots, gamma = make(1024, 8, 16, 256), make(59, dtype=torch.int64), make(128)
        table = make(2, 40960, 64, dtype=torch.float32)
        rotate_into_cache(make(59, 6144), gamma, gamma, 1e-6, slots, table, cache, slots)
        store_kv(make(59, 8, 128), make(59, 8, 128), cache, slots)
        add_rms_norm(make(59, 4096), make(59, 4096), make(4096), 1e-6)
