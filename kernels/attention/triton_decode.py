"""Triton kernel of attention over pages for steps of few rows a sequence, as in decoding: one launch, whose grid no value decides."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels._triton.numerics import exp2
from rlk.kernels.attention.triton_forward import MINUS_INFINITY, PAGED, attend_tile, finish, first_pages, join, states_of

MANY = tl.constexpr(32)  # split states whose maxima are read together
AHEAD = tl.constexpr(8)  # split states whose values are


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def fetch(part_o, first, i, count, real, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """o of state ``i`` of each of the heads whose ``count`` states begin at ``first``; 0 behind the last, and where not ``real``."""
    d = tl.arange(0, BLOCK_D)
    inside = (real & (first + i < first + count))[:, None] & (d < DIM)[None, :]
    return tl.load(part_o + (first + i)[:, None] * DIM + d[None, :], mask=inside, other=0.0, cache_modifier=".cg")


@triton.jit
def join_splits(part_o, part_m, part_l, first, count, real, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """(m, s, o) of ``count`` states joined ascending, of each of the heads whose states begin at ``first``; empty where not ``real``.

    As :func:`join` one after the other. What it multiplies by depends on the maxima alone, and is found for many states at once.
    """
    BLOCK_H: tl.constexpr = first.shape[0]
    i = tl.arange(0, MANY)
    m = tl.full([BLOCK_H], MINUS_INFINITY, tl.float32)
    s = tl.zeros([BLOCK_H, MANY], tl.float32)  # equal columns
    o = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
    ahead = ()
    for j in tl.static_range(AHEAD):
        ahead += (fetch(part_o, first, j, count, real, DIM, BLOCK_D),)  # type: ignore[assignment]
    for base in range(0, count, MANY):
        slot = first[:, None] + base + i[None, :]
        live = real[:, None] & (base + i < count)[None, :]
        own = tl.load(part_m + slot, mask=live, other=MINUS_INFINITY, cache_modifier=".cg")
        sums = tl.load(part_l + slot, mask=live, other=0.0, cache_modifier=".cg")
        earlier = tl.load(part_m + slot - 1, mask=live & (i > 0)[None, :], other=MINUS_INFINITY, cache_modifier=".cg")
        before = tl.maximum(tl.associative_scan(earlier, 1, _larger), m[:, None])
        top = tl.maximum(before, own)
        shift = tl.where(top == MINUS_INFINITY, 0.0, top)
        old = exp2(before - shift)
        new = exp2(own - shift)
        m = tl.max(top, 1)
        for start in range(0, tl.minimum(count - base, MANY), AHEAD):
            now = ahead
            ahead = ()
            for j in tl.static_range(AHEAD):
                ahead += (fetch(part_o, first, base + start + AHEAD + j, count, real, DIM, BLOCK_D),)  # type: ignore[assignment]
            for j in tl.static_range(AHEAD):  # a state behind the last leaves the others alone
                wide = tl.full([BLOCK_H, BLOCK_D], 0, tl.int32) + (start + j)
                narrow = tl.full([BLOCK_H, MANY], 0, tl.int32) + (start + j)
                o = o * tl.gather(old, wide, 1) + now[j] * tl.gather(new, wide, 1)
                s = s * tl.gather(old, narrow, 1) + tl.gather(sums, narrow, 1) * tl.gather(new, narrow, 1)
    return m, tl.max(s, 1), o


@triton.jit
def work_of(starts, lengths, i, count, tokens, reach, KV_SPLIT: tl.constexpr, FOLD: tl.constexpr):
    """(first row, rows, keys, pieces of work) of the sequences ``i``, none from ``count`` on.

    Pieces are splits, one at least, or the sequence; a sequence without rows has none.
    """
    here = i < count
    row = tl.maximum(tl.load(starts + i, mask=here, other=0).to(tl.int32), 0)
    rows = tl.minimum(tl.load(starts + i + 1, mask=here, other=0).to(tl.int32), tokens) - row
    length = tl.load(lengths + i, mask=here, other=0).to(tl.int32)
    pieces = tl.maximum(tl.cdiv(tl.minimum(length, reach), KV_SPLIT), 1) if KV_SPLIT > 0 and not FOLD else length * 0 + 1
    return row, rows, length, tl.where(rows > 0, pieces, 0)


@triton.jit
def share(starts, lengths, count, tokens, reach, KV_SPLIT: tl.constexpr, FOLD: tl.constexpr, SEARCHED: tl.constexpr):
    """(pieces of a program, first piece of this one, end of its pieces, sequence of the first, pieces before that sequence).

    The pieces of all sequences lie one behind the other and every program takes the same number of them, however lengths differ: as many
    as make them equal, or a sixteenth more where the longest sequence is then cut into fewer parts.
    """
    segment, before, seen = 0, 0, 0
    total = 0
    if count == 1:
        _, _, _, total = work_of(starts, lengths, 0, count, tokens, reach, KV_SPLIT, FOLD)
        run = tl.cdiv(total, tl.num_programs(0))
    else:
        longest = 0
        for base in range(0, count, SEARCHED):
            _, _, _, pieces = work_of(starts, lengths, base + tl.arange(0, SEARCHED), count, tokens, reach, KV_SPLIT, FOLD)
            total += tl.sum(pieces, 0)
            longest = tl.maximum(longest, tl.max(pieces, 0))
        run = tl.cdiv(total, tl.num_programs(0))
        even = tl.cdiv(longest, tl.maximum(longest // tl.maximum(run, 1), 1))
        run = even if (even > run) & (even <= run + run // 16) else run
    piece = tl.program_id(0) * run
    if (count > 1) & (piece < total):
        for base in range(0, count, SEARCHED):
            _, _, _, pieces = work_of(starts, lengths, base + tl.arange(0, SEARCHED), count, tokens, reach, KV_SPLIT, FOLD)
            ends = seen + tl.cumsum(pieces, 0)
            passed = (ends <= piece) & (base + tl.arange(0, SEARCHED) < count)
            segment += tl.sum(passed.to(tl.int32), 0)
            before = tl.maximum(before, tl.max(tl.where(passed, ends, 0), 0))
            seen = tl.max(ends, 0)
    return run, piece, tl.minimum(piece + run, total), segment, before


@triton.jit(do_not_specialize=["count", "tokens", "table_stride", "reach", "page_limit", "splits"])
def attention_decode(
    q, k, v, out, part, arrived, starts, lengths, table, count, tokens, c, q_row_stride, q_head_stride, k_row_stride,
    k_head_stride, v_row_stride, v_head_stride, page_stride, table_stride, reach, page_limit, splits,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, KV_TILE: tl.constexpr, KV_SPLIT: tl.constexpr,
    PAGE: tl.constexpr, FOLD: tl.constexpr, SEARCHED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out [rows, heads, DIM] of the rows starts[i] … starts[i+1]-1 of each of ``count`` sequences, the last of its lengths[i] keys. Grid:
    (programs, KV heads).

    A program takes its share of the splits of all sequences. Rows whose splits are all its own it joins itself. Of others it writes the
    states to part, fp32: o [rows, heads, splits, DIM], then m and l [rows, heads, splits]; the last to arrive at arrived [rows, KV heads]
    joins them, ascending, and leaves 0 there. FOLD: a sequence is never shared. A sequence of more than ``reach`` keys, for which there is
    no room, gives NaN.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    STEP: tl.constexpr = BLOCK_M // GROUP
    HEADS: tl.constexpr = 4 if GROUP <= 4 else 8  # joined together
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    k += kv_head * k_head_stride
    v += kv_head * v_head_stride
    d = tl.arange(0, BLOCK_D)
    part_m = part + tokens.to(tl.int64) * (kv_heads * GROUP) * splits * DIM
    part_l = part_m + tokens.to(tl.int64) * (kv_heads * GROUP) * splits
    run, piece, last, segment, before = share(starts, lengths, count, tokens, reach, KV_SPLIT, FOLD, SEARCHED)
    while piece < last:
        row, rows, length, pieces = work_of(starts, lengths, segment, count, tokens, reach, KV_SPLIT, FOLD)
        pages = table + segment.to(tl.int64) * table_stride
        for offset in range(0, rows, STEP):
            place, at, head, real = states_of(row, rows, offset, kv_head, GROUP, BLOCK_M)
            positions = length - rows + place
            inside = real[:, None] & (d < DIM)[None, :]
            end = tl.minimum(length - rows + tl.minimum(offset + STEP, rows), reach)  # keys that the last row sees
            span = KV_SPLIT if KV_SPLIT > 0 else tl.maximum(end, 1)
            needed = tl.maximum(tl.cdiv(end, span), 0)
            first_split = 0 if FOLD else piece - before
            end_split = needed if FOLD else tl.minimum(last - before, needed)
            if (first_split < end_split) | ((needed == 0) & (first_split == 0)):
                queries = tl.load(q + (at * q_row_stride + head * q_head_stride)[:, None] + d[None, :], mask=inside, other=0.0)
                result = at * (kv_heads * GROUP) + head
                apart = end_split - first_split < needed
                total_m = tl.full([BLOCK_M], MINUS_INFINITY, tl.float32)
                total_l = tl.zeros([BLOCK_M], tl.float32)
                total_o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                m = tl.full([BLOCK_M], MINUS_INFINITY, tl.float32)
                s = tl.zeros([BLOCK_M, 16], tl.float32)
                o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                bad = tl.zeros([triton.next_power_of_2(KV_TILE)], tl.int32)
                low = first_split * span
                high = tl.minimum(end_split * span, end)
                page = first_pages(pages, low, high, KV_TILE, PAGE, PAGED)
                # One loop over the tiles of all splits, so that loads run ahead across a split's end too.
                for start in range(low, high, KV_TILE):
                    m, s, o, bad, page = attend_tile(
                        queries, m, s, o, bad, page, positions, start, high, k, v, k_row_stride, v_row_stride, page_stride, pages,
                        page_limit, c, DIM, KV_TILE, PAGE, True, PAGED,
                    )  # fmt: skip
                    after = start + KV_TILE
                    if (after >= high) | (after % span == 0):
                        sums = tl.max(s, 1)  # of equal columns
                        told = tl.where((tl.max(bad, 0) > 0) | (length > reach), float("nan"), m)
                        if FOLD:
                            total_m, total_l, total_o = join(total_m, total_l, total_o, told, sums, o)
                        elif apart:
                            slot = result * splits + start // span
                            tl.store(part + slot[:, None] * DIM + d[None, :], o, mask=inside)
                            tl.store(part_m + slot, told, mask=real)
                            tl.store(part_l + slot, sums, mask=real)
                        else:
                            total_m, total_l, total_o = join(total_m, total_l, total_o, told, sums, o)
                        m = tl.full([BLOCK_M], MINUS_INFINITY, tl.float32)
                        s = tl.zeros([BLOCK_M, 16], tl.float32)
                        o = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                if FOLD:
                    tl.store(out + result[:, None] * DIM + d[None, :], finish(total_l, total_o), mask=inside)
                elif apart:
                    tl.debug_barrier()  # every thread's states are written before the arrival is told
                    arrivals = arrived + (row + offset) * kv_heads + kv_head
                    sharers = (before + needed - 1) // run - before // run + 1
                    if tl.atomic_add(arrivals, 1, sem="acq_rel") == sharers - 1:
                        tl.store(arrivals, 0)
                        for i in range(tl.minimum(STEP, rows - offset)):
                            for some in tl.static_range(0, GROUP, HEADS):
                                h = some + tl.arange(0, HEADS)
                                first = (row + offset + i).to(tl.int64) * (kv_heads * GROUP) + kv_head * GROUP + h
                                _, joined_l, joined_o = join_splits(
                                    part, part_m, part_l, first * splits, needed, h < GROUP, DIM, BLOCK_D
                                )  # fmt: skip
                                whole = (h < GROUP)[:, None] & (d < DIM)[None, :]
                                tl.store(out + first[:, None] * DIM + d[None, :], finish(joined_l, joined_o), mask=whole)
                else:
                    tl.store(out + result[:, None] * DIM + d[None, :], finish(total_l, total_o), mask=inside)
        before += pieces
        piece = before
        segment += 1
