"""Triton backend of sampling, batched, without a wait of the host. Its sums are of integers: how rows are dealt out to programs is free.

An id and its t are one int64, its *rank*: the bits of t in an order of integers, its *key*, above, the id from above below. Ranks of a row
are distinct, and descending ranks are the rule's order. What a row retains is all ranks from its *cut* on.

    _highest      highest rank of each block of columns; keys of a sample that split the row in about equal parts, its *pivots*
    _weigh        the weight of all ids, and bounds of the weight from each pivot on
    _gather       ranks between the two pivots where the cut must lie, and the exact weight above them
    _find         the cut among the ranks that were gathered
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
from rlk.kernels.sampling.cpu import POWER

SOURCE = TritonSource("sampling")
BLOCK = 2048  # columns of one block
PIVOTS = 32
SAMPLE = 1024  # columns whose keys the pivots are taken from
STEP = 256  # columns that _weigh compares with all pivots at once
STEPS = 32  # most such steps of one program: so many 25-bit numbers fit an int32
CHUNK = 4096  # ranks that _find holds in registers
PLACES = 1 << 15  # ranks that are gathered at most; where more lie between the pivots, _find reads the row again

WEIGH_WARPS, FIND_WARPS = 8, 16

NOT_FINITE = tl.constexpr((1 << 63) - 1)
ALL = tl.constexpr(-(1 << 63))
LOWEST, HIGHEST = tl.constexpr(-(1 << 31)), tl.constexpr((1 << 31) - 1)
P0, P1, P2, P3, P4, P5, P6 = (tl.constexpr(c) for c in POWER)
COARSE: tl.constexpr = tl.constexpr(19)  # bits of a weight that the bounds leave out

# state[row]: what the kernels tell each other, 32 numbers; those of top_k from 8 on, those of top_p from 16 on.
ROW: tl.constexpr = tl.constexpr(32)
TOTAL: tl.constexpr = tl.constexpr(0)  # weight of all ids, then of those that top_k left
ABOVE: tl.constexpr = tl.constexpr(0)  # weight of the ids above those between the pivots
BEFORE: tl.constexpr = tl.constexpr(1)  # how many these are
GATHERED: tl.constexpr = tl.constexpr(2)  # ids between the pivots
CUT: tl.constexpr = tl.constexpr(3)
LOW: tl.constexpr = tl.constexpr(4)  # keys from here on
HIGH: tl.constexpr = tl.constexpr(5)  # and below here are between the pivots


@triton.jit
def _key(t):
    """Integer that orders t fp32, -0 as +0."""
    bits = tl.where(t == 0.0, 0.0, t).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _rank(t, column):
    """Rank, int64, of t fp32 and its id."""
    return (_key(t).to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)


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
    logits, temperature, highest, pivots, masses, counts, state, row_stride, vocab, blocks,
    BLOCK: tl.constexpr, PIVOTS: tl.constexpr, SAMPLE: tl.constexpr, TRUNCATES: tl.constexpr,
):  # fmt: skip
    """highest[row, block], NOT_FINITE where a t is not; pivots[row], descending. Sets the row's sums to 0. Grid: (rows, blocks)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < vocab
    t = _scaled(logits, temperature, row, row_stride, column, inside)
    rank = tl.where(inside, tl.where(tl.abs(t) < float("inf"), _rank(t, column), NOT_FINITE), ALL)
    tl.store(highest + row * blocks + block, tl.max(rank, 0))
    if TRUNCATES:  # noqa: SIM102
        if block == 0:
            at = tl.arange(0, SAMPLE)
            taken = (at.to(tl.int64) * vocab // SAMPLE).to(tl.int32)
            key = tl.sort(_key(_scaled(logits, temperature, row, row_stride, taken, at < SAMPLE)), descending=True)
            place = row * PIVOTS + tl.arange(0, PIVOTS)
            tl.store(pivots + place, tl.min(tl.reshape(key, (PIVOTS, SAMPLE // PIVOTS)), 1))
            tl.store(masses + place, tl.zeros([PIVOTS], tl.int64))
            tl.store(counts + place, tl.zeros([PIVOTS], tl.int32))
            tl.store(state + row * ROW + tl.arange(0, ROW), tl.zeros([ROW], tl.int64))


@triton.jit(do_not_specialize=["vocab", "blocks", "steps"])
def _weigh(
    logits, temperature, top_p, top_k, highest, pivots, masses, counts, state, row_stride, vocab, blocks, steps,
    BY_COUNT: tl.constexpr, STEP: tl.constexpr, PIVOTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """masses[row]: sum of w >> COARSE from each pivot on; counts[row]: ids from it on; TOTAL. Grid: (rows, columns/(steps·STEP))."""
    row = tl.program_id(0).to(tl.int64)
    by_count, by_weight = _limits(top_k, top_p, row, vocab)
    top = _top(highest, row, blocks, BLOCKS)
    if (by_count | by_weight) & (top != NOT_FINITE):
        m, place = _value(top), row * PIVOTS + tl.arange(0, PIVOTS)
        pivot = tl.load(pivots + place)[:, None]
        mass, count = tl.zeros([PIVOTS, STEP], tl.int32), tl.zeros([PIVOTS, STEP], tl.int32)
        total = tl.zeros([STEP], tl.int64)
        begin = tl.program_id(1) * steps * STEP
        for first in range(begin, tl.minimum(begin + steps * STEP, vocab), STEP):
            column = first + tl.arange(0, STEP)
            inside = column < vocab
            t = _scaled(logits, temperature, row, row_stride, column, inside)
            weight = tl.where(inside, _weight(t - m), 0)
            from_here = tl.where(inside, _key(t), LOWEST)[None, :] >= pivot
            mass += tl.where(from_here, (weight >> COARSE).to(tl.int32)[None, :], 0)
            total += weight
            if BY_COUNT:
                count += tl.where(from_here, 1, 0)
        tl.atomic_add(masses + place, tl.sum(mass.to(tl.int64), 1), sem="relaxed")
        tl.atomic_add(state + row * ROW + TOTAL, tl.sum(total, 0), sem="relaxed")
        if BY_COUNT:
            tl.atomic_add(counts + place, tl.sum(count, 1), sem="relaxed")


@triton.jit
def _between(pivots, masses, counts, row, wanted, vocab, BY_WEIGHT: tl.constexpr, PIVOTS: tl.constexpr):
    """(low, high, before): the cut's key is at least low and less than high, from which on ``before`` ids lie (by count).

    A sum of weights lies between that of their upper bits and the same with one more for each id.
    """
    place = row * PIVOTS + tl.arange(0, PIVOTS)
    pivot, before = tl.load(pivots + place), tl.load(counts + place)
    if BY_WEIGHT:
        mass = tl.load(masses + place)
        enough, short = (mass << COARSE) >= wanted, ((mass + vocab) << COARSE) < wanted
    else:
        enough, short = before >= wanted, before < wanted
    low = tl.max(tl.where(enough, pivot, LOWEST), 0)
    high = tl.min(tl.where(short, pivot, HIGHEST), 0)
    return low, high, tl.max(tl.where(short, before, 0), 0)


@triton.jit(do_not_specialize=["vocab", "blocks", "each", "places"])
def _gather(
    logits, temperature, top_p, top_k, highest, pivots, masses, counts, state, gathered, row_stride, vocab, blocks, each, places,
    BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr, PIVOTS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """gathered[row] = ranks between the pivots, in any order, as many as there are places for; the row's state but CUT.

    Grid: (rows, blocks/each).
    """
    row = tl.program_id(0).to(tl.int64)
    by_count, by_weight = _limits(top_k, top_p, row, vocab)
    top = _top(highest, row, blocks, BLOCKS)
    if (by_weight if BY_WEIGHT else by_count) & (top != NOT_FINITE):
        m, state = _value(top), state + row * ROW
        wanted = _share(tl.load(top_p + row), tl.load(state + TOTAL)) if BY_WEIGHT else tl.load(top_k + row)
        state += 16 if BY_WEIGHT else 8
        low, high, before = _between(pivots, masses, counts, row, wanted, vocab, BY_WEIGHT, PIVOTS)
        if tl.program_id(1) == 0:
            tl.store(state + BEFORE, before.to(tl.int64))
            tl.store(state + LOW, low.to(tl.int64))
            tl.store(state + HIGH, high.to(tl.int64))
        above = tl.zeros([BLOCK], tl.int64)
        for block in range(tl.program_id(1) * each, tl.minimum(tl.program_id(1) * each + each, blocks)):
            column = block * BLOCK + tl.arange(0, BLOCK)
            inside = column < vocab
            t = _scaled(logits, temperature, row, row_stride, column, inside)
            key = _key(t)
            above += tl.where(inside & (key >= high), _weight(t - m), 0)
            taken = (inside & (key >= low) & (key < high)).to(tl.int32)
            place = tl.atomic_add(state + GATHERED, tl.sum(taken, 0).to(tl.int64), sem="relaxed") + tl.cumsum(taken, 0) - 1
            tl.store(gathered + row * places + place, _rank(t, column), mask=(taken != 0) & (place < places))
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
def _ranks(
    logits, temperature, gathered, state, row, row_stride, vocab, places, start, m, BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """CHUNK of the ranks between the pivots, from the list or, where it does not hold all, from the row; ALL where there is none.

    And what each adds, its weight or 1, and its weight.
    """
    at, count = start + tl.arange(0, CHUNK), tl.load(state + GATHERED)
    if count <= places:
        rank = tl.load(gathered + at, mask=at < count, other=ALL)
    else:
        t = _scaled(logits, temperature, row, row_stride, at, at < vocab)
        key = _key(t).to(tl.int64)
        real = (at < vocab) & (key >= tl.load(state + LOW)) & (key < tl.load(state + HIGH))
        rank = tl.where(real, _rank(t, at), ALL)
    weight = tl.where(rank == ALL, 0, _weight(_value(rank) - m))
    return rank, (weight if BY_WEIGHT else tl.where(rank == ALL, 0, 1).to(tl.int64)), weight


@triton.jit(do_not_specialize=["vocab", "blocks", "places"])
def _find(
    logits, temperature, top_p, top_k, highest, state, gathered, row_stride, vocab, blocks, places,
    BY_WEIGHT: tl.constexpr, CHUNK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """CUT: the highest rank from which on the row holds what is wanted; by count also TOTAL. Grid: (rows,).

    The rank is looked for between the least and the most of those that are left, halving the distance, until one is left.
    """
    row = tl.program_id(0).to(tl.int64)
    by_count, by_weight = _limits(top_k, top_p, row, vocab)
    top = _top(highest, row, blocks, BLOCKS)
    if (by_weight if BY_WEIGHT else by_count) & (top != NOT_FINITE):
        m, total = _value(top), state + row * ROW + TOTAL
        state += row * ROW + (16 if BY_WEIGHT else 8)
        wanted = _share(tl.load(top_p + row), tl.load(total)) if BY_WEIGHT else tl.load(top_k + row)
        wanted -= tl.load(state + (ABOVE if BY_WEIGHT else BEFORE))
        gathered += row * places
        count = tl.load(state + GATHERED)
        count = tl.where(count <= places, count, vocab)
        rank, measure, weight = _ranks(
            logits, temperature, gathered, state, row, row_stride, vocab, places, 0, m, BY_WEIGHT, CHUNK
        )  # fmt: skip
        low, high = tl.min(tl.where(rank == ALL, NOT_FINITE, rank), 0), tl.max(rank, 0)
        for start in range(CHUNK, count, CHUNK):
            more, more_measure, more_weight = _ranks(
                logits, temperature, gathered, state, row, row_stride, vocab, places, start, m, BY_WEIGHT, CHUNK
            )  # fmt: skip
            low = tl.minimum(low, tl.min(tl.where(more == ALL, NOT_FINITE, more), 0))
            high = tl.maximum(high, tl.max(more, 0))
        while low < high:
            middle = (low | high) - ((low ^ high) >> 1)
            got, least, most = _split(rank, measure, middle)
            for start in range(CHUNK, count, CHUNK):
                more, more_measure, more_weight = _ranks(
                    logits, temperature, gathered, state, row, row_stride, vocab, places, start, m, BY_WEIGHT, CHUNK
                )  # fmt: skip
                part, part_least, part_most = _split(more, more_measure, middle)
                got, least, most = got + part, tl.minimum(least, part_least), tl.maximum(most, part_most)
            low, high = tl.where(got >= wanted, least, low), tl.where(got >= wanted, high, most)
        tl.store(state + CUT, low)
        if not BY_WEIGHT:
            left = tl.load(state + ABOVE) + tl.sum(tl.where(rank >= low, weight, 0), 0)
            for start in range(CHUNK, count, CHUNK):
                more, more_measure, more_weight = _ranks(
                    logits, temperature, gathered, state, row, row_stride, vocab, places, start, m, BY_WEIGHT, CHUNK
                )  # fmt: skip
                left += tl.sum(tl.where(more >= low, more_weight, 0), 0)
            tl.store(total, left)


@triton.jit
def _cut(top_p, top_k, state, row, vocab):
    """Lowest rank that the row retains."""
    by_count, by_weight = _limits(top_k, top_p, row, vocab)
    at = tl.where(by_weight, 16, 8) + CUT
    return tl.where(by_count | by_weight, tl.load(state + row * ROW + at), ALL)


@triton.jit(do_not_specialize=["vocab", "blocks", "words"])
def _retain(
    logits, temperature, top_p, top_k, highest, state, support, masses, row_stride, vocab, blocks, words,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, TRUNCATES: tl.constexpr,
):  # fmt: skip
    """support[row, :] in words of 32 ids, and masses[row, block]. Grid: (rows, blocks)."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    kept = column < vocab
    t = _scaled(logits, temperature, row, row_stride, column, kept)
    weight = _weight(t - _value(_top(highest, row, blocks, BLOCKS)))
    if TRUNCATES:
        kept &= _rank(t, column) >= _cut(top_p, top_k, state, row, vocab)
        bits = tl.reshape(kept.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :]
        word = block * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
        tl.store(support + row * words + word, tl.sum(bits, 1), mask=word < words)
    tl.store(masses + row * blocks + block, tl.sum(tl.where(kept, weight, 0), 0))


@triton.jit(do_not_specialize=["vocab", "blocks"])
def _pick(
    logits, temperature, top_p, top_k, seed, position, highest, state, masses, ids, failed, row_stride, vocab, blocks,
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
            kept &= _rank(t, column) >= _cut(top_p, top_k, state, row, vocab)
        running = tl.cumsum(tl.where(kept, _weight(t - _value(top)), 0), 0) + tl.sum(tl.where(at < block, mass, 0), 0)
        tl.store(ids + row, tl.minimum(block * BLOCK + tl.sum((running <= target).to(tl.int32), 0), vocab - 1).to(tl.int64))


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, seed: torch.Tensor, position: torch.Tensor,
    failed: torch.Tensor, vocab_size: int, padded_vocab: int, by_count: bool, by_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, stride, truncates = len(logits), logits.stride(0), by_count or by_weight
    blocks, words = triton.cdiv(padded_vocab, BLOCK), padded_vocab // 32
    sizes = {"BLOCK": BLOCK, "BLOCKS": triton.next_power_of_2(blocks)}
    make = lambda dtype, *shape: torch.empty(shape, dtype=dtype, device=logits.device)
    ids, highest, masses = make(torch.int64, rows), make(torch.int64, rows, blocks), make(torch.int64, rows, blocks)
    support = make(torch.int32, rows, words) if truncates else None
    if not rows:
        return ids, None if support is None else support.view(torch.uint8)
    z, limits = (logits, temperature), (top_p, top_k)
    state = make(torch.int64, rows, ROW.value)
    pivots = (make(torch.int32, rows, PIVOTS), make(torch.int64, rows, PIVOTS), make(torch.int32, rows, PIVOTS))
    SOURCE.launch(
        _highest, (rows, blocks), *z, highest, *pivots, state, stride, vocab_size, blocks, op="sampling", BLOCK=BLOCK, PIVOTS=PIVOTS,
        SAMPLE=SAMPLE, TRUNCATES=truncates,
    )  # fmt: skip
    if truncates:
        wave = 8 * processors(logits.device)
        steps = max(1, min(STEPS, rows * vocab_size // (STEP * wave)))
        SOURCE.launch(
            _weigh, (rows, triton.cdiv(vocab_size, steps * STEP)), *z, *limits, highest, *pivots, state, stride, vocab_size, blocks, steps,
            op=None, BY_COUNT=by_count, STEP=STEP, PIVOTS=PIVOTS, BLOCKS=sizes["BLOCKS"], warps=WEIGH_WARPS,
        )  # fmt: skip
        each = max(1, min(8, rows * blocks // wave))
        gathered = make(torch.int64, rows, PLACES)
        for needed, kind in ((by_count, False), (by_weight, True)):
            if needed:
                SOURCE.launch(
                    _gather, (rows, triton.cdiv(blocks, each)), *z, *limits, highest, *pivots, state, gathered, stride, vocab_size, blocks,
                    each, PLACES, op=None, BY_WEIGHT=kind, PIVOTS=PIVOTS, **sizes,
                )  # fmt: skip
                SOURCE.launch(
                    _find, (rows,), *z, *limits, highest, state, gathered, stride, vocab_size, blocks, PLACES, op=None, warps=FIND_WARPS,
                    BY_WEIGHT=kind, CHUNK=CHUNK, BLOCKS=sizes["BLOCKS"],
                )  # fmt: skip
    SOURCE.launch(
        _retain, (rows, blocks), *z, *limits, highest, state, ids if support is None else support, masses, stride, vocab_size, blocks,
        words, op=None, TRUNCATES=truncates, **sizes,
    )  # fmt: skip
    SOURCE.launch(
        _pick, (rows,), *z, *limits, seed, position, highest, state, masses, ids, failed, stride, vocab_size, blocks, op=None,
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
