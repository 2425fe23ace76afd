"""Triton kernels of attention's forward pass: one row core for packed, owned (context parallel) and paged keys.

A program holds BLOCK_M states: positions of one sequence times the query heads of one KV head, so that a decode step still fills a matrix
instruction and heads of a group share every load. The bytes of a row depend on its position alone: BLOCK_M, warps, stages and the choice
between folding splits in registers and in a second kernel change where work runs, not its order.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels._triton.numerics import exp2, log2, with_quiet_nan

WHOLE = tl.constexpr(0)  # segments: [count + 1] offsets of whole packed sequences, queries and keys alike
OWNED = tl.constexpr(1)  # segments: [count, 5] rows of rlk.kernels.attention.context.Segment
PAGED = tl.constexpr(2)  # segments: [count + 1] offsets of query rows; lengths: [count], keys of each sequence
MINUS_INFINITY = tl.constexpr(float("-inf"))
SEARCH = tl.constexpr(256)  # segments looked at in one load


@triton.jit
def find_block(segments, count, block, KIND: tl.constexpr, STEP: tl.constexpr):
    """Segment that block ``block`` of STEP rows lies in, and its first row inside the segment.

    Segment i starts at block first(i)//STEP + i, so that every segment has at least the blocks it needs and the grid depends on the number
    of rows and segments only. First rows outside the segment belong to no row.
    """
    stride: tl.constexpr = 5 if KIND == OWNED else 1
    before = 0
    for base in range(0, count, SEARCH):
        i = base + tl.arange(0, SEARCH)
        first = tl.load(segments + i * stride, mask=i < count, other=0).to(tl.int32)
        before += tl.sum(((i < count) & (first // STEP + i <= block)).to(tl.int32), 0)
    segment = tl.maximum(before, 1) - 1
    first = tl.load(segments + segment * stride).to(tl.int32)
    return segment, (block - first // STEP - segment) * STEP


@triton.jit
def describe(segments, lengths, tokens, segment, KIND: tl.constexpr):
    """(row, rows, position of row, row of position 0 on the other side, length of the sequence there) of a segment.

    Offsets that are not checked, as in a captured graph, cannot name a row outside the ``tokens`` rows.
    """
    if KIND == OWNED:
        at = segments + segment * 5
        row = tl.load(at).to(tl.int32)
        rows = tl.load(at + 1).to(tl.int32)
        position = tl.load(at + 2).to(tl.int32)
        other = tl.load(at + 3).to(tl.int32)
        length = tl.load(at + 4).to(tl.int32)
    else:
        row = tl.maximum(tl.load(segments + segment).to(tl.int32), 0)
        rows = tl.minimum(tl.load(segments + segment + 1).to(tl.int32), tokens) - row
        if KIND == PAGED:
            length = tl.load(lengths + segment).to(tl.int32)
            position = length - rows
            other = 0
        else:
            length = rows
            position = 0
            other = row
    return row, rows, position, other, length


@triton.jit
def states_of(row, rows, offset, kv_head, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """(place in the segment, row, head, whether there is one) of each state of the block that begins at place ``offset``."""
    state = tl.arange(0, BLOCK_M)
    place = offset + state // GROUP
    real = (state < BLOCK_M // GROUP * GROUP) & (place < rows)
    return place, (row + place).to(tl.int64), kv_head * GROUP + state % GROUP, real


@triton.jit
def load_both(k_at, v_at, live, PARTIAL: tl.constexpr):
    """Keys and values; PARTIAL: +0 where not ``live``."""
    if PARTIAL:
        return tl.load(k_at, mask=live, other=0.0), tl.load(v_at, mask=live, other=0.0)
    else:  # noqa: RET505
        return tl.load(k_at), tl.load(v_at)


@triton.jit
def join(m, s, o, part_m, part_l, part_o):
    """State of an earlier and a later range of keys. An empty one (m = -inf, s = o = 0) leaves the other's values alone. No FMA."""
    top = tl.maximum(m, part_m)
    base = tl.where(top == MINUS_INFINITY, 0.0, top)
    first = exp2(m - base)
    second = exp2(part_m - base)
    return top, s * first + part_l * second, o * first[:, None] + part_o * second[:, None]


@triton.jit
def finish(s, o):
    """bf16(o/s). Adding +0 first makes a zero of either sign +0: a tile without visible keys must not show in the sign of a zero."""
    return with_quiet_nan(tl.div_rn(o + 0.0, s[:, None]), tl.bfloat16)


@triton.jit
def pages_of(table, key, high, PAGE: tl.constexpr):
    """Page of each key below high."""
    return tl.load(table + key // PAGE, mask=key < high, other=0)


@triton.jit
def first_pages(table, low, high, KV_TILE: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr):
    """Pages of the keys of the first tile of low … high-1; zeros where keys are packed."""
    key = low + tl.arange(0, triton.next_power_of_2(KV_TILE))
    if KIND == PAGED:
        return pages_of(table, key, high, PAGE)
    else:  # noqa: RET505
        return tl.zeros_like(key)


@triton.jit
def attend_tile(
    q, m, s, o, bad, page, positions, start, high, k, v, k_row_stride, v_row_stride, page_stride, table, page_limit, c,
    DIM: tl.constexpr, KV_TILE: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Takes the tile of keys from ``start`` on, of those below ``high``, into the states. MASKED: some row does not see some key of it.

    q: [M, D] bf16; m: [M]; s: [M, 16], equal columns; o: [M, D]; bad: [N] counts keys whose page is outside the cache; page: [N] of this
    tile's keys. Returns the new states and the pages of the next tile.
    """
    BLOCK_N: tl.constexpr = triton.next_power_of_2(KV_TILE)
    BLOCK_D: tl.constexpr = q.shape[1]
    d = tl.arange(0, BLOCK_D)
    ones = tl.full([BLOCK_N, 16], 1.0, tl.bfloat16)
    key = start + tl.arange(0, BLOCK_N)
    ahead = page
    if KIND == PAGED:
        ahead = pages_of(table, key + KV_TILE, high, PAGE)  # so that a tile's loads do not wait for their addresses
        known = (page >= 0) & (page < page_limit)
        bad += (known == 0).to(tl.int32)
        place = tl.where(known, page, 0).to(tl.int64) * page_stride
        k_at = k + (place + (key % PAGE) * k_row_stride)[:, None] + d[None, :]
        v_at = v + (place + (key % PAGE) * k_row_stride)[:, None] + d[None, :]
    else:
        k_at = k + (key.to(tl.int64) * k_row_stride)[:, None] + d[None, :]
        v_at = v + (key.to(tl.int64) * v_row_stride)[:, None] + d[None, :]
    live = ((key < high) & (key < start + KV_TILE))[:, None] & (d < DIM)[None, :]
    keys, values = load_both(k_at, v_at, live, MASKED or DIM != BLOCK_D)
    t = tl.dot(q, tl.trans(keys)) * c
    if MASKED:
        sees = (key[None, :] <= positions[:, None]) & (key < start + KV_TILE)[None, :]
        t = tl.where(sees, t, MINUS_INFINITY)
    top = tl.maximum(m, tl.max(t, 1))
    base = tl.where(top == MINUS_INFINITY, 0.0, top)  # a row that saw no key yet keeps its empty state
    alpha = exp2(m - base)
    p = exp2(t - base[:, None]).to(tl.bfloat16)
    s = tl.dot(p, ones, s * alpha[:, None])
    o = tl.dot(p, values, o * alpha[:, None])
    return top, s, o, bad, ahead


@triton.jit
def attend(
    q, m, s, o, bad, positions, low, high, k, v, k_row_stride, v_row_stride, page_stride, table, page_limit, c,
    DIM: tl.constexpr, KV_TILE: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Takes the tiles of keys low … high-1 into the states, ascending, as attend_tile."""
    page = first_pages(table, low, high, KV_TILE, PAGE, KIND)
    for start in range(low, high, KV_TILE):
        m, s, o, bad, page = attend_tile(
            q, m, s, o, bad, page, positions, start, high, k, v, k_row_stride, v_row_stride, page_stride, table, page_limit, c,
            DIM, KV_TILE, PAGE, MASKED, KIND,
        )  # fmt: skip
    return m, s, o, bad


@triton.jit(do_not_specialize=["count", "tokens", "table_stride", "reach", "page_limit", "splits", "programs"])
def attention_forward(
    q, k, v, out, lse2, part_o, part_m, part_l, segments, lengths, table, count, tokens, c, q_row_stride, q_head_stride, k_row_stride,
    k_head_stride, v_row_stride, v_head_stride, page_stride, table_stride, reach, page_limit, splits, programs,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, KV_TILE: tl.constexpr, KV_SPLIT: tl.constexpr,
    PAGE: tl.constexpr, KIND: tl.constexpr, FOLD: tl.constexpr, STORE_LSE: tl.constexpr,
):  # fmt: skip
    """One block of positions of one segment and one KV head. Grid: (blocks, KV heads, programs).

    FOLD: this program joins all splits and writes out [rows, heads, DIM] and lse2 [rows, heads]. Otherwise program z takes the splits
    z, z + programs, … and writes their states to part_o [rows, heads, splits, DIM], part_m and part_l [rows, heads, splits].
    A sequence of more than ``reach`` keys, for which there is no room, gives NaN.
    """
    STEP: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1) * GROUP
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of a sequence first
    segment, offset = find_block(segments, count, block, KIND, STEP)
    row, rows, position, other, length = describe(segments, lengths, tokens, segment, KIND)
    if (offset < 0) | (offset >= rows):
        return
    place, at, head, real = states_of(row, rows, offset, kv_head, GROUP, BLOCK_M)
    positions = position + place
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + (at * q_row_stride + head * q_head_stride)[:, None] + d[None, :], mask=inside, other=0.0)
    k += kv_head * k_head_stride + other.to(tl.int64) * k_row_stride if KIND != PAGED else kv_head * k_head_stride
    v += kv_head * v_head_stride + other.to(tl.int64) * v_row_stride if KIND != PAGED else kv_head * v_head_stride
    table += segment.to(tl.int64) * table_stride

    end = tl.minimum(position + tl.minimum(offset + STEP, rows), reach)  # keys that the last row sees
    plain = (position + offset + 1) // KV_TILE * KV_TILE if triton.next_power_of_2(KV_TILE) == KV_TILE else 0  # tiles every row sees whole
    span = KV_SPLIT if KV_SPLIT > 0 else end
    total_m = tl.full([BLOCK_M], MINUS_INFINITY, tl.float32)
    total_l = tl.zeros([BLOCK_M], tl.float32)
    total_o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in range(tl.program_id(2), tl.cdiv(end, span), programs):
        low = split * span
        high = tl.minimum(low + span, end)
        middle = tl.maximum(low, tl.minimum(high, plain))
        m = tl.full([BLOCK_M], MINUS_INFINITY, tl.float32)
        s = tl.zeros([BLOCK_M, 16], tl.float32)
        o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        bad = tl.zeros([triton.next_power_of_2(KV_TILE)], tl.int32)
        m, s, o, bad = attend(
            queries, m, s, o, bad, positions, low, middle, k, v, k_row_stride, v_row_stride, page_stride, table, page_limit, c,
            DIM, KV_TILE, PAGE, False, KIND,
        )  # fmt: skip
        m, s, o, bad = attend(
            queries, m, s, o, bad, positions, middle, high, k, v, k_row_stride, v_row_stride, page_stride, table, page_limit, c,
            DIM, KV_TILE, PAGE, True, KIND,
        )  # fmt: skip
        sums = tl.max(s, 1)  # of equal columns
        if KIND == PAGED:
            m = tl.where((tl.max(bad, 0) > 0) | (length > reach), float("nan"), m)
        if FOLD:
            total_m, total_l, total_o = join(total_m, total_l, total_o, m, sums, o)
        else:
            slot = (at * heads + head) * splits + split
            tl.store(part_o + slot[:, None] * DIM + d[None, :], o, mask=inside)
            tl.store(part_m + slot, m, mask=real)
            tl.store(part_l + slot, sums, mask=real)
    if FOLD:
        result = at * heads + head
        tl.store(out + result[:, None] * DIM + d[None, :], finish(total_l, total_o), mask=inside)
        if STORE_LSE:
            tl.store(lse2 + result, total_m + log2(total_l), mask=real)


@triton.jit(do_not_specialize=["count", "tokens", "splits"])
def attention_join(
    part_o, part_m, part_l, out, lse2, segments, lengths, count, tokens, splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, KV_SPLIT: tl.constexpr, KIND: tl.constexpr,
    STORE_LSE: tl.constexpr,
):  # fmt: skip
    """Joins the states of attention_forward's splits, ascending. Grid: (rows, KV heads)."""
    row = tl.program_id(0)
    heads = tl.num_programs(1) * GROUP
    before = 0
    stride: tl.constexpr = 5 if KIND == OWNED else 1
    for base in range(0, count, SEARCH):
        i = base + tl.arange(0, SEARCH)
        first = tl.load(segments + i * stride, mask=i < count, other=0).to(tl.int32)
        before += tl.sum(((i < count) & (first <= row)).to(tl.int32), 0)
    first, rows, position, _, _ = describe(segments, lengths, tokens, tl.maximum(before, 1) - 1, KIND)
    visible = tl.minimum(position + row - first + 1, splits * KV_SPLIT)
    if (row < first) | (row >= first + rows):
        return
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    real = h < GROUP
    inside = real[:, None] & (d < DIM)[None, :]
    result = row.to(tl.int64) * heads + tl.program_id(1) * GROUP + h
    m = tl.full([BLOCK_H], MINUS_INFINITY, tl.float32)
    s = tl.zeros([BLOCK_H], tl.float32)
    o = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for split in range(tl.cdiv(visible, KV_SPLIT)):
        slot = result * splits + split
        part_o_ = tl.load(part_o + slot[:, None] * DIM + d[None, :], mask=inside, other=0.0)
        part_m_ = tl.load(part_m + slot, mask=real, other=MINUS_INFINITY)
        part_l_ = tl.load(part_l + slot, mask=real, other=0.0)
        m, s, o = join(m, s, o, part_m_, part_l_, part_o_)
    tl.store(out + result[:, None] * DIM + d[None, :], finish(s, o), mask=inside)
    if STORE_LSE:
        tl.store(lse2 + result, m + log2(s), mask=real)
