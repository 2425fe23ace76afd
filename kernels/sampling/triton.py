"""Triton backend of sampling, batched, without a wait of the host. Its sums are of integers: how rows are dealt out to programs is free.
On Hopper a kernel in CUDA C++ draws instead (``sm90``), whose ids and supports are the same.

An id and its t are one int64, its *rank*: the bits of t in an order of integers above, the id from above below. Ranks of a row are
distinct, and descending ranks are the rule's order. What a row retains is all ranks from its *cut* on.

    _highest      highest rank of each block of columns
    _count        ids per bin of m - t, and the sum of all weights
    _gather       ids in the bins where the cut must lie, and the weight above them: one bin for top_k, those between bounds for top_p
    _find         the cut among the ids that were gathered
    _retain       support as bits, and the retained weight of each block
    _pick         the token
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.launch import processors
from rlk.kernels._triton.numerics import LOG2_E
from rlk.kernels.dispatch import hopper
from rlk.kernels.sampling import sm90
from rlk.kernels.sampling.cpu import POWER

SOURCE = TritonSource("sampling")
BLOCK = 2048  # columns of one block
BINS = 2048  # of 1/64 nat; the last one holds all that lies beyond
CHUNK = 2048  # gathered ids that one program looks at together

NOT_FINITE = tl.constexpr((1 << 63) - 1)
ALL = tl.constexpr(-(1 << 63))
P0, P1, P2, P3, P4, P5, P6 = (tl.constexpr(c) for c in POWER)

# sums[row]: what the kernels tell each other, 16 numbers; those of top_k at 4 … 8, those of top_p at 8 … 12.
ROW: tl.constexpr = tl.constexpr(16)
TOTAL: tl.constexpr = tl.constexpr(0)  # weight of all ids, then of those that top_k left
ABOVE: tl.constexpr = tl.constexpr(0)  # weight of the ids in earlier bins than those gathered
BEFORE: tl.constexpr = tl.constexpr(1)  # how many these are
GATHERED: tl.constexpr = tl.constexpr(2)  # ids gathered
CUT: tl.constexpr = tl.constexpr(3)


@triton.jit
def _rank(t, column):
    """Rank, int64, of t fp32 and its id."""
    bits = tl.where(t == 0.0, 0.0, t).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0x7FFFFFFF - column).to(tl.int64)


@triton.jit
def _value(rank):
    """t of a rank."""
    ordered = (rank >> 32).to(tl.int32)
    return tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x):
    """floor(2^44 exp(x)) of x = t - m fp32, as int64; the rule's step 2."""
    y = tl.maximum(x * LOG2_E, -64.0)
    n = tl.floor(y)
    f = y - n
    p = f * P6 + P5
    p = p * f + P4
    p = p * f + P3
    p = p * f + P2
    p = p * f + P1
    p = p * f + P0
    mantissa = (p * 8388608.0).to(tl.int32).to(tl.int64)
    return (mantissa << 21) >> (-n).to(tl.int32).to(tl.int64)


@triton.jit
def _bin(distance, BINS: tl.constexpr):
    return tl.maximum(tl.minimum(distance * 64.0, BINS - 1.0).to(tl.int32), 0)


@triton.jit
def _top(highest, row, blocks, BLOCKS: tl.constexpr):
    """Highest rank of the row."""
    at = tl.arange(0, BLOCKS)
    return tl.max(tl.load(highest + row * blocks + at, mask=at < blocks, other=ALL), 0)


@triton.jit
def _share(top_p, total):
    """ceil(top_p·total), at least 1; top_p is the fixed point's bits."""
    fixed, whole = top_p.to(tl.uint64, bitcast=True), total.to(tl.uint64, bitcast=True)
    rest = tl.where(fixed * whole != 0, 1, 0)
    return tl.maximum(tl.umulhi(fixed, whole).to(tl.int64, bitcast=True) + rest, 1)


@triton.jit
def _philox(seed, position):
    """First 64 bits of Philox4x64-10, key (seed, 0), counter (position + 1, 0, 0, 0)."""
    c0 = position.to(tl.uint64, bitcast=True) + 1
    c1, c2, c3 = c0 * 0, c0 * 0, c0 * 0
    k0, k1 = seed.to(tl.uint64, bitcast=True), c0 * 0
    m0, m1 = tl.full((), 0xD2E7470EE14C6C93, tl.uint64), tl.full((), 0xCA5A826395121157, tl.uint64)
    for _ in tl.static_range(10):
        high0, low0, high1, low1 = tl.umulhi(m0, c0), m0 * c0, tl.umulhi(m1, c2), m1 * c2
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0 += tl.full((), 0x9E3779B97F4A7C15, tl.uint64)
        k1 += tl.full((), 0xBB67AE8584CAA73B, tl.uint64)
    return c0


@triton.jit
def _limits(top_k, top_p, row, vocab):
    """(whether top_k cuts, whether top_p cuts) the row."""
    k = tl.load(top_k + row)
    return (k > 0) & (k < vocab), (k != 0) & (tl.load(top_p + row) != -1)


@triton.jit
def _scaled(logits, temperature, row, row_stride, column, inside):
    """t of columns of the row."""
    return tl.div_rn(tl.load(logits + row * row_stride + column, mask=inside, other=0.0), tl.load(temperature + row))


@triton.jit(do_not_specialize=["vocab", "blocks"])
def _highest(
    logits, temperature, highest, counts, sums, row_stride, vocab, blocks, BLOCK: tl.constexpr, BINS: tl.constexpr
):  # fmt: skip
    """highest[row, block], NOT_FINITE where a t is not. Sets the row's counts and sums to 0. Grid: (rows, blocks)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    t = _scaled(logits, temperature, row, row_stride, column, inside)
    rank = tl.where(inside, tl.where(tl.abs(t) < float("inf"), _rank(t, column), NOT_FINITE), ALL)
    tl.store(highest + row * blocks + block, tl.max(rank, 0))
    if block == 0:
        tl.store(counts + row * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        tl.store(sums + row * ROW + tl.arange(0, ROW), tl.zeros([ROW], tl.int64))


@triton.jit(do_not_specialize=["vocab", "blocks", "each"])
def _count(
    logits, temperature, top_p, top_k, highest, counts, sums, row_stride, vocab, blocks, each,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """counts[row], and the weight of all ids in sums[row]. Grid: (rows, blocks/each)."""
    row = tl.program_id(0).to(tl.int64)
    by_count, by_weight = _limits(top_k, top_p, row, vocab)
    top = _top(highest, row, blocks, BLOCKS)
    if (by_count | by_weight) & (top != NOT_FINITE):
        m = _value(top)
        count, total = tl.zeros([BINS], tl.int32), tl.zeros([BLOCK], tl.int64)
        for block in range(tl.program_id(1) * each, tl.minimum(tl.program_id(1) * each + each, blocks)):
            column = block * BLOCK + tl.arange(0, BLOCK)
            inside = column < vocab
            x = _scaled(logits, temperature, row, row_stride, column, inside) - m
            count += tl.histogram(_bin(-x, BINS), BINS, mask=inside)
            total += tl.where(inside, _weight(x), 0)
        bin = tl.arange(0, BINS)
        tl.atomic_add(counts + row * BINS + bin, count, mask=count > 0, sem="relaxed")
        tl.atomic_add(sums + row * ROW + TOTAL, tl.sum(total, 0), sem="relaxed")


@triton.jit
def _bracket(counts, row, wanted, BY_WEIGHT: tl.constexpr, BINS: tl.constexpr):
    """First and last bin that can hold the cut, and how many ids lie in earlier bins than the first.

    The weight of an id lies between those at its bin's edges, but for 2^-16 of it and 1: more than any rounding moves it.
    """
    bin = tl.arange(0, BINS)
    count = tl.load(counts + row * BINS + bin)
    if BY_WEIGHT:
        most = _weight(bin.to(tl.float32) * -0.015625)
        least = _weight((bin + 1).to(tl.float32) * -0.015625)
        most += (most >> 16) + 1
        least = tl.where(bin == BINS - 1, 0, tl.maximum(least - (least >> 16) - 1, 0))
        first = tl.sum((tl.cumsum(count * most, 0) < wanted).to(tl.int32), 0)
        last = tl.minimum(tl.sum((tl.cumsum(count * least, 0) < wanted).to(tl.int32), 0), BINS - 1)
    else:
        first = tl.sum((tl.cumsum(count, 0) < wanted).to(tl.int32), 0)
        last = first
    return first, last, tl.sum(tl.where(bin < first, count, 0), 0)


@triton.jit(do_not_specialize=["vocab", "blocks", "each", "places"])
def _gather(
    logits, temperature, top_p, top_k, highest, counts, sums, gathered, row_stride, vocab, blocks, each, places,
    BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """gathered[row] = ids in the bins that can hold the cut, in any order; ABOVE, BEFORE, GATHERED. Grid: (rows, blocks/each)."""
    row = tl.program_id(0).to(tl.int64)
    by_count, by_weight = _limits(top_k, top_p, row, vocab)
    top = _top(highest, row, blocks, BLOCKS)
    if (by_weight if BY_WEIGHT else by_count) & (top != NOT_FINITE):
        m, state = _value(top), sums + row * ROW
        wanted = _share(tl.load(top_p + row), tl.load(state + TOTAL)) if BY_WEIGHT else tl.load(top_k + row)
        state += 8 if BY_WEIGHT else 4
        first, last, before = _bracket(counts, row, wanted, BY_WEIGHT, BINS)
        if tl.program_id(1) == 0:
            tl.store(state + BEFORE, before.to(tl.int64))
        above = tl.zeros([BLOCK], tl.int64)
        for block in range(tl.program_id(1) * each, tl.minimum(tl.program_id(1) * each + each, blocks)):
            column = block * BLOCK + tl.arange(0, BLOCK)
            inside = column < vocab
            x = _scaled(logits, temperature, row, row_stride, column, inside) - m
            bin = _bin(-x, BINS)
            above += tl.where(inside & (bin < first), _weight(x), 0)
            taken = (inside & (bin >= first) & (bin <= last)).to(tl.int32)
            place = tl.atomic_add(state + GATHERED, tl.sum(taken, 0).to(tl.int64), sem="relaxed") + tl.cumsum(taken, 0) - 1
            tl.store(gathered + row * places + place, column, mask=taken != 0)
        tl.atomic_add(state + ABOVE, tl.sum(above, 0), sem="relaxed")


@triton.jit
def _join(measure, least, most, other_measure, other_least, other_most):
    return measure + other_measure, tl.minimum(least, other_least), tl.maximum(most, other_most)


@triton.jit
def _split(rank, measure, at):
    """Measure and least of the ranks >= at, most of those below. A rank ALL does not exist."""
    up = rank >= at
    return tl.reduce((tl.where(up, measure, 0), tl.where(up, rank, NOT_FINITE), tl.where(up, ALL, rank)), 0, _join)


@triton.jit
def _ranks(logits, temperature, gathered, row, row_stride, start, count, m, BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr):
    """Ranks of CHUNK gathered ids from number ``start`` on, and what each adds: its weight, or 1. ALL and 0 beyond the last."""
    at = start + tl.arange(0, CHUNK)
    real = at < count
    column = tl.load(gathered + at, mask=real, other=0)
    t = _scaled(logits, temperature, row, row_stride, column, real)
    weight = tl.where(real, _weight(t - m), 0)
    measure = weight if BY_WEIGHT else real.to(tl.int64)
    return tl.where(real, _rank(t, column), ALL), measure, weight


@triton.jit(do_not_specialize=["vocab", "blocks", "places"])
def _find(
    logits, temperature, top_p, top_k, highest, sums, gathered, row_stride, vocab, blocks, places,
    BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """CUT: the highest rank from which on the row holds what is wanted; by count also TOTAL. Grid: (rows,).

    The rank is looked for between the least and the most of those that are left, halving the distance, until one is left.
    """
    row = tl.program_id(0).to(tl.int64)
    by_count, by_weight = _limits(top_k, top_p, row, vocab)
    top = _top(highest, row, blocks, BLOCKS)
    if (by_weight if BY_WEIGHT else by_count) & (top != NOT_FINITE):
        m, total = _value(top), sums + row * ROW + TOTAL
        state = sums + row * ROW + (8 if BY_WEIGHT else 4)
        wanted = _share(tl.load(top_p + row), tl.load(total)) if BY_WEIGHT else tl.load(top_k + row)
        wanted -= tl.load(state + (ABOVE if BY_WEIGHT else BEFORE))
        count, gathered = tl.load(state + GATHERED), gathered + row * places
        rank, measure, weight = _ranks(logits, temperature, gathered, row, row_stride, 0, count, m, BY_WEIGHT, CHUNK)
        low, high = tl.min(tl.where(rank == ALL, NOT_FINITE, rank), 0), tl.max(rank, 0)
        for start in range(CHUNK, count, CHUNK):
            more, more_measure, more_weight = _ranks(
                logits, temperature, gathered, row, row_stride, start, count, m, BY_WEIGHT, CHUNK
            )  # fmt: skip
            low = tl.minimum(low, tl.min(tl.where(more == ALL, NOT_FINITE, more), 0))
            high = tl.maximum(high, tl.max(more, 0))
        while low < high:
            middle = (low | high) - ((low ^ high) >> 1)
            got, least, most = _split(rank, measure, middle)
            for start in range(CHUNK, count, CHUNK):
                more, more_measure, more_weight = _ranks(
                    logits, temperature, gathered, row, row_stride, start, count, m, BY_WEIGHT, CHUNK
                )  # fmt: skip
                part, part_least, part_most = _split(more, more_measure, middle)
                got, least, most = got + part, tl.minimum(least, part_least), tl.maximum(most, part_most)
            low, high = tl.where(got >= wanted, least, low), tl.where(got >= wanted, high, most)
        tl.store(state + CUT, low)
        if not BY_WEIGHT:
            left = tl.load(state + ABOVE) + tl.sum(tl.where(rank >= low, weight, 0), 0)
            for start in range(CHUNK, count, CHUNK):
                more, more_measure, more_weight = _ranks(
                    logits, temperature, gathered, row, row_stride, start, count, m, BY_WEIGHT, CHUNK
                )  # fmt: skip
                left += tl.sum(tl.where(more >= low, more_weight, 0), 0)
            tl.store(total, left)


@triton.jit
def _cut(top_p, top_k, sums, row, vocab):
    """Lowest rank that the row retains."""
    by_count, by_weight = _limits(top_k, top_p, row, vocab)
    at = tl.where(by_weight, 8, 4) + CUT
    return tl.where(by_count | by_weight, tl.load(sums + row * ROW + at), ALL)


@triton.jit(do_not_specialize=["vocab", "blocks", "words"])
def _retain(
    logits, temperature, top_p, top_k, highest, sums, support, masses, row_stride, vocab, blocks, words,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TRUNCATES: tl.constexpr,
):  # fmt: skip
    """support[row, :] in words of 32 ids, and masses[row, block]. Grid: (rows, blocks)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    kept = column < vocab
    t = _scaled(logits, temperature, row, row_stride, column, kept)
    weight = _weight(t - _value(_top(highest, row, blocks, BLOCKS)))
    if TRUNCATES:
        kept &= _rank(t, column) >= _cut(top_p, top_k, sums, row, vocab)
        bits = tl.reshape(kept.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
        word = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        tl.store(support + row * words + word, tl.sum(bits, 1), mask=word < words)
    tl.store(masses + row * blocks + block, tl.sum(tl.where(kept, weight, 0), 0))


@triton.jit(do_not_specialize=["vocab", "blocks"])
def _pick(
    logits, temperature, top_p, top_k, seed, position, highest, sums, masses, ids, failed, row_stride, vocab, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, BY_COUNT: tl.constexpr, BY_WEIGHT: tl.constexpr,
):  # fmt: skip
    """ids[row]; failed if the row is not finite, or has a limit that this step does not look at. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    top = _top(highest, row, blocks, BLOCKS)
    by_count, by_weight = _limits(top_k, top_p, row, vocab)
    overlooked = (by_count & (not BY_COUNT)) | (by_weight & (not BY_WEIGHT))
    if (top == NOT_FINITE) | overlooked:
        tl.store(ids + row, 0)
        none = tl.full((), 0, tl.int64)
        if tl.atomic_cas(failed, none, none + tl.where(overlooked, 2, 1)) == 0:
            tl.store(failed + 1, tl.load(seed + row))
            tl.store(failed + 2, tl.load(position + row))
    elif tl.load(top_k + row) == 0:
        tl.store(ids + row, 0x7FFFFFFF - (top & 0x7FFFFFFF))
    else:
        at = tl.arange(0, BLOCKS)
        mass = tl.load(masses + row * blocks + at, mask=at < blocks, other=0)
        uniform = _philox(tl.load(seed + row), tl.load(position + row))
        target = tl.umulhi(uniform, tl.sum(mass, 0).to(tl.uint64, bitcast=True)).to(tl.int64, bitcast=True)
        block = tl.sum((tl.cumsum(mass, 0) <= target).to(tl.int32), 0)
        column = block * BLOCK + tl.arange(0, BLOCK)
        kept = column < vocab
        t = _scaled(logits, temperature, row, row_stride, column, kept)
        if BY_COUNT or BY_WEIGHT:
            kept &= _rank(t, column) >= _cut(top_p, top_k, sums, row, vocab)
        running = tl.cumsum(tl.where(kept, _weight(t - _value(top)), 0), 0) + tl.sum(tl.where(at < block, mass, 0), 0)
        tl.store(ids + row, tl.minimum(block * BLOCK + tl.sum((running <= target).to(tl.int32), 0), vocab - 1).to(tl.int64))


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, seed: torch.Tensor, position: torch.Tensor,
    failed: torch.Tensor, vocab_size: int, padded_vocab: int, by_count: bool, by_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    if hopper(logits.device):
        return sm90.sample(
            logits, temperature, top_p, top_k, seed, position, failed, vocab_size, padded_vocab, by_count, by_weight
        )  # fmt: skip
    rows, stride, truncates = len(logits), logits.stride(0), by_count or by_weight
    blocks, words = triton.cdiv(padded_vocab, BLOCK), padded_vocab // 32
    sizes = {"BLOCK": BLOCK, "BLOCKS": triton.next_power_of_2(blocks)}
    make = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device=logits.device)
    ids, highest, masses = make(torch.int64, rows), make(torch.int64, rows, blocks), make(torch.int64, rows, blocks)
    sums, counts = make(torch.int64, rows, ROW.value), make(torch.int32, rows, BINS)
    support = make(torch.int32, rows, words) if truncates else None
    if not rows:
        return ids, None if support is None else support.view(torch.uint8)
    z = (logits, temperature)
    limits = (top_p, top_k)
    SOURCE.launch(_highest, (rows, blocks), *z, highest, counts, sums, stride, vocab_size, blocks, op="sampling", BINS=BINS, BLOCK=BLOCK)
    if truncates:
        each = max(1, min(8, rows * blocks // (8 * processors(logits.device))))
        dealt = (rows, triton.cdiv(blocks, each))
        gathered = make(torch.int32, rows, padded_vocab)
        SOURCE.launch(_count, dealt, *z, *limits, highest, counts, sums, stride, vocab_size, blocks, each, op=None, BINS=BINS, **sizes)
        for needed, kind in ((by_count, False), (by_weight, True)):
            if needed:
                SOURCE.launch(
                    _gather, dealt, *z, *limits, highest, counts, sums, gathered, stride, vocab_size, blocks, each, padded_vocab, op=None,
                    BY_WEIGHT=kind, BINS=BINS, **sizes,
                )  # fmt: skip
                SOURCE.launch(
                    _find, (rows,), *z, *limits, highest, sums, gathered, stride, vocab_size, blocks, padded_vocab, op=None, warps=8,
                    BY_WEIGHT=kind, CHUNK=CHUNK, BLOCKS=sizes["BLOCKS"],
                )  # fmt: skip
    SOURCE.launch(
        _retain, (rows, blocks), *z, *limits, highest, sums, ids if support is None else support, masses, stride, vocab_size, blocks,
        words, op=None, TRUNCATES=truncates, **sizes,
    )  # fmt: skip
    SOURCE.launch(
        _pick, (rows,), *z, *limits, seed, position, highest, sums, masses, ids, failed, stride, vocab_size, blocks, op=None,
        BY_COUNT=by_count, BY_WEIGHT=by_weight, **sizes,
    )  # fmt: skip
    return ids, None if support is None else support.view(torch.uint8)


def examples() -> None:
    """Calls for the ahead-of-time harness: Qwen3's vocabulary, one row and many, without limits and with both."""
    with torch.device("meta"):
        failed = torch.empty(3, dtype=torch.int64)
        for rows in (1, 128):
            logits, temperature, whole = torch.empty(rows, 151936), torch.empty(rows), torch.empty(rows, dtype=torch.int64)
            for limit in (False, True):
                sample(logits, temperature, whole, whole, whole, whole, failed, 151936, 152576, limit, limit)
