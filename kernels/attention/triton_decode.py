"""Triton kernel of attention over pages for steps of few rows a sequence, as in decoding: one launch, whose grid no value decides."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels.attention.triton_forward import MINUS_INFINITY, PAGED, attend_tile, finish, first_pages, join

AHEAD = tl.constexpr(8)  # split states that are fetched together


@triton.jit
def join_splits(part, part_m, part_l, first, splits, count, real, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(m, s, o) of ``count`` states joined ascending, for each of the heads whose states begin at first·splits; not ``real`` are empty."""
    BLOCK_H: tl.constexpr = first.shape[0]
    d = tl.arange(0, BLOCK_D)
    m = tl.full([BLOCK_H], MINUS_INFINITY, tl.float32)
    s = tl.zeros([BLOCK_H], tl.float32)
    o = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    for base in range(0, count, AHEAD):
        for i in tl.static_range(AHEAD):  # an absent state is empty, which leaves the other alone
            slot = first * splits + base + i
            live = real & (slot < first * splits + count)
            inside = live[:, None] & (d < DIM)[None, :]
            next_m = tl.load(part_m + slot, mask=live, other=MINUS_INFINITY, cache_modifier=".cg")
            next_s = tl.load(part_l + slot, mask=live, other=0.0, cache_modifier=".cg")
            next_o = tl.load(part + slot[:, None] * DIM + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")
            m, s, o = join(m, s, o, next_m, next_s, next_o)
    return m, s, o


@triton.jit(do_not_specialize=["tokens", "table_stride", "reach", "page_limit", "splits"])
def attention_decode(
    q, k, v, out, part, arrived, starts, lengths, table, tokens, c, q_row_stride, q_head_stride, k_row_stride,
    k_head_stride, v_row_stride, v_head_stride, page_stride, table_stride, reach, page_limit, splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, KV_TILE: tl.constexpr, KV_SPLIT: tl.constexpr,
    PAGE: tl.constexpr, FOLD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [rows, heads, DIM] of the rows starts[i] … starts[i+1]-1 of sequence i, the last of its lengths[i] keys. Grid: (sequences,
    KV heads, programs).

    FOLD: one program takes all splits of its rows. Otherwise each program takes a run of splits and writes their states to part,
    fp32: o [rows, heads, splits, DIM], then m and l [rows, heads, splits]; the last to arrive at arrived [rows, KV heads] joins them,
    ascending, and leaves 0 there. Rows with a single split need neither.
    A sequence of more than ``reach`` keys, for which there is no room, gives NaN.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    STEP: tl.constexpr = BLOCK_M // GROUP
    segment = tl.program_id(0)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    programs = tl.num_programs(2)
    row = tl.maximum(tl.load(starts + segment).to(tl.int32), 0)
    rows = tl.minimum(tl.load(starts + segment + 1).to(tl.int32), tokens) - row
    length = tl.load(lengths + segment).to(tl.int32)
    table += segment.to(tl.int64) * table_stride
    k += kv_head * k_head_stride
    v += kv_head * v_head_stride
    state = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + state % GROUP
    d = tl.arange(0, BLOCK_D)
    part_m = part + tokens.to(tl.int64) * (kv_heads * GROUP) * splits * DIM
    part_l = part_m + tokens.to(tl.int64) * (kv_heads * GROUP) * splits
    for offset in range(0, rows, STEP):
        place = offset + state // GROUP
        real = (state < STEP * GROUP) & (place < rows)
        positions = length - rows + place
        at = (row + place).to(tl.int64)
        inside = real[:, None] & (d < DIM)[None, :]
        end = tl.minimum(length - rows + tl.minimum(offset + STEP, rows), reach)  # keys that the last row sees
        span = KV_SPLIT if KV_SPLIT > 0 else tl.maximum(end, 1)
        count = tl.cdiv(end, span)
        first_split = tl.program_id(2) * count // programs
        end_split = (tl.program_id(2) + 1) * count // programs
        if (first_split < end_split) | ((count == 0) & (tl.program_id(2) == 0)):
            queries = tl.load(q + (at * q_row_stride + head * q_head_stride)[:, None] + d[None, :], mask=inside, other=0.0)
            result = at * (kv_heads * GROUP) + head
            apart = count > 1 if not FOLD else False
            total_m = tl.full([BLOCK_M], MINUS_INFINITY, tl.float32)
            total_l = tl.zeros([BLOCK_M], tl.float32)
            total_o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            m = tl.full([BLOCK_M], MINUS_INFINITY, tl.float32)
            s = tl.zeros([BLOCK_M, 16], tl.float32)
            o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            bad = tl.zeros([triton.next_power_of_2(KV_TILE)], tl.int32)
            low = first_split * span
            high = tl.minimum(end_split * span, end)
            page = first_pages(table, low, high, KV_TILE, PAGE, PAGED)
            # One loop over the tiles of all splits, so that loads run ahead across a split's end too.
            for start in range(low, high, KV_TILE):
                m, s, o, bad, page = attend_tile(
                    queries, m, s, o, bad, page, positions, start, high, k, v, k_row_stride, v_row_stride, page_stride, table, page_limit,
                    c, DIM, KV_TILE, PAGE, True, PAGED,
                )  # fmt: skip
                after = start + KV_TILE
                if (after >= high) | (after % span == 0):
                    sums = tl.max(s, 1)  # of equal columns
                    part_m_ = tl.where((tl.max(bad, 0) > 0) | (length > reach), float("nan"), m)
                    if apart:
                        slot = result * splits + start // span
                        tl.store(part + slot[:, None] * DIM + d[None, :], o, mask=inside)
                        tl.store(part_m + slot, part_m_, mask=real)
                        tl.store(part_l + slot, sums, mask=real)
                    else:
                        total_m, total_l, total_o = join(total_m, total_l, total_o, part_m_, sums, o)
                    m = tl.full([BLOCK_M], MINUS_INFINITY, tl.float32)
                    s = tl.zeros([BLOCK_M, 16], tl.float32)
                    o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
            if apart:
                tl.debug_barrier()  # every thread's states are written before the arrival is told
                arrivals = arrived + (row + offset) * kv_heads + kv_head
                expected = tl.minimum(programs, count)
                if tl.atomic_add(arrivals, 1, sem="acq_rel") == expected - 1:
                    tl.store(arrivals, 0)
                    h = tl.arange(0, triton.next_power_of_2(GROUP))
                    for i in range(tl.minimum(STEP, rows - offset)):
                        first = (row + offset + i).to(tl.int64) * (kv_heads * GROUP) + kv_head * GROUP + h
                        _, joined_l, joined_o = join_splits(part, part_m, part_l, first, splits, count, h < GROUP, DIM, BLOCK_D)
                        whole = (h < GROUP)[:, None] & (d < DIM)[None, :]
                        tl.store(out + first[:, None] * DIM + d[None, :], finish(joined_l, joined_o), mask=whole)
            else:
                tl.store(out + result[:, None] * DIM + d[None, :], finish(total_l, total_o), mask=inside)
