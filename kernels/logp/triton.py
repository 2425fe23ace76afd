"""Triton backend of logp: states of vocabulary tiles, their merge, and slopes of logits, over a whole row or a range of its columns.

A tile's state is one program's work whatever the launch looks like; merges are exact copies of the contract's order, so that neither the
number of tiles a program takes nor the range of columns that is in memory can change a byte.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.launch import processors
from rlk.kernels._triton.numerics import column_tree, exp, log, row_tree, with_quiet_nan
from rlk.kernels.direct import differentiable
from rlk.kernels.logp import cpu
from rlk.kernels.logp.shards import Columns

SOURCE = TritonSource("logp")
MINUS_INFINITY = tl.constexpr(float("-inf"))
SLOPES = 2048  # columns of one program of the backward pass


@triton.jit
def _merge(m, s, part_m, part_s):
    """States of two ranges of columns as one, no FMA. An empty state (-inf, 0) leaves the other's values alone."""
    top = tl.maximum(m, part_m)
    base = tl.where(top == MINUS_INFINITY, 0.0, top)
    return top, s * exp(m - base) + part_s * exp(part_m - base)


@triton.jit
def _merge_shards(m, s):
    """Tree of adjacent pairs over the first axis of [shards, rows], a power of two. [rows]."""
    if m.shape[0] == 1:
        return tl.reshape(m, (m.shape[1],)), tl.reshape(s, (s.shape[1],))
    else:  # noqa: RET505
        pairs: tl.constexpr = (m.shape[0] // 2, 2, m.shape[1])
        m, s = tl.reduce((tl.reshape(m, pairs), tl.reshape(s, pairs)), 1, _merge)
        return _merge_shards(m, s)


@triton.jit
def _supported(support, row, stride, column, inside, SUPPORT: tl.constexpr):
    """Columns of the row that its support holds, of those ``inside``; a support of bits has column 8i + j in bit j of byte i."""
    if SUPPORT == "bits":
        return inside & (((tl.load(support + row * stride + column // 8, mask=inside, other=0) >> (column % 8)) & 1) != 0)
    else:  # noqa: RET505
        return inside & (tl.load(support + row * stride + column, mask=inside, other=0) != 0)


@triton.jit(do_not_specialize=["first", "shard", "tiles", "limit"])
def _tile_states(
    logits, ids, temperature, support, active, selected, top, total, row_stride, support_stride, first, shard, shards, tiles, limit,
    SHARD: tl.constexpr, TILE: tl.constexpr, LINES: tl.constexpr, LINE: tl.constexpr, EACH: tl.constexpr, SUPPORT: tl.constexpr,
    ACTIVE: tl.constexpr,
):  # fmt: skip
    """(max, sum relative to it) of EACH tiles of one row and shard into top, total [rows, tiles, shards]. Grid: (rows, tiles/EACH, shards).

    logits: [rows, columns from ``first`` on]; the shard is ``shard`` + program. selected[row] receives the logit of the row's id where a
    tile holds it. A tile lies in LINES lines of LINE columns: the first levels of its row tree join lines.
    """
    row = tl.program_id(0).to(tl.int64)
    if ACTIVE:  # noqa: SIM102
        if tl.load(active + row) == 0:
            return
    shard += tl.program_id(2)
    z = logits + row * row_stride - first
    t = tl.load(temperature + row)
    id = tl.load(ids + row)
    end = tl.minimum((shard + 1) * SHARD, limit)
    place = tl.arange(0, LINES)[:, None] * LINE + tl.arange(0, LINE)[None, :]
    for tile in range(tl.program_id(1) * EACH, tl.minimum(tl.program_id(1) * EACH + EACH, tiles)):
        begin = shard * SHARD + tile * TILE
        stop = tl.minimum(begin + TILE, end)
        column = begin + place
        inside = column < stop
        if SUPPORT != "":
            inside = _supported(support, row, support_stride, column, inside, SUPPORT)
        value = tl.where(inside, tl.div_rn(tl.load(z + column, mask=inside, other=0.0), t), MINUS_INFINITY)
        m = tl.max(value)
        e = exp(value - tl.where(m == MINUS_INFINITY, 0.0, m))
        s = tl.sum(row_tree(tl.reshape(column_tree(e), (1, LINE))), 0)  # of the one element that is left
        at = (row * tiles + tile) * shards + shard
        tl.store(top + at, tl.where(s == s, m, float("nan")))  # a NaN among columns of no mass must not look like an empty tile
        tl.store(total + at, s)
        if (id >= begin) & (id < stop):
            tl.store(selected + row, tl.load(z + id))


@triton.jit(do_not_specialize=["rows", "tiles", "limit"])
def _part(
    ids, temperature, support, active, selected, top, total, part, logp, lse, support_stride, rows, tiles, limit,
    SHARD: tl.constexpr, SHARDS: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr, SUPPORT: tl.constexpr, ACTIVE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """part[row] = (max, sum, z/T of the row's id): tiles ascending, shards by tree. Grid: (blocks of rows,).

    An id elsewhere gives +0, one that could not be scored NaN. WHOLE: these are all shards; logp and lse are stored instead.
    AHEAD tiles are read together and merged one after the other.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    scored = real & (tl.load(active + row, mask=real, other=0) != 0) if ACTIVE else real
    t = tl.load(temperature + row, mask=scored, other=1.0)
    id = tl.load(ids + row, mask=scored, other=-1)
    here = (id >= 0) & (id < SHARDS * SHARD)
    valid = here & (id < limit) & (t > 0.0) & (t < float("inf"))
    if SUPPORT != "":
        valid = _supported(support, row, support_stride, id, valid, SUPPORT)
    z = tl.div_rn(tl.load(selected + row, mask=valid, other=0.0), t)
    m = tl.full([SHARDS, BLOCK], MINUS_INFINITY, tl.float32)
    s = tl.zeros([SHARDS, BLOCK], tl.float32)
    for first in range(0, tiles, AHEAD):
        for ahead in tl.static_range(AHEAD):
            tile = tl.full([1, 1], first + ahead, tl.int32)
            at = (row[None, :] * tiles + tile) * SHARDS + tl.arange(0, SHARDS)[:, None]
            there = scored[None, :] & (tile < tiles)
            part_m = tl.load(top + at, mask=there, other=MINUS_INFINITY)
            part_s = tl.load(total + at, mask=there, other=0.0)
            m, s = _merge(m, s, part_m, part_s)
    m, s = _merge_shards(m, s)
    if WHOLE:
        row_lse = m + log(s)
        tl.store(lse + row, tl.where(scored, row_lse, 0.0), mask=real)
        tl.store(logp + row, tl.where(scored, tl.where(valid, z, float("nan")) - row_lse, 0.0), mask=real)
    else:
        tl.store(part + row * 3, tl.where(scored, m, 0.0), mask=real)
        tl.store(part + row * 3 + 1, tl.where(scored, s, 0.0), mask=real)
        tl.store(part + row * 3 + 2, tl.where(valid, z, tl.where(here, float("nan"), 0.0)), mask=real)


@triton.jit(do_not_specialize=["rows", "width"])
def _join(parts, ids, active, logp, lse, rows, width, RANKS: tl.constexpr, BLOCK: tl.constexpr, ACTIVE: tl.constexpr):
    """logp and lse [rows] of parts [RANKS, rows, 3] of ``width`` columns each, by the tree of adjacent pairs. Grid: (blocks of rows,)."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = row < rows
    scored = real & (tl.load(active + row, mask=real, other=0) != 0) if ACTIVE else real
    at = parts + (tl.arange(0, RANKS)[:, None] * rows.to(tl.int64) + row[None, :]) * 3
    m = tl.load(at, mask=scored[None, :], other=MINUS_INFINITY)
    s = tl.load(at + 1, mask=scored[None, :], other=0.0)
    m, s = _merge_shards(m, s)
    row_lse = m + log(s)
    id = tl.load(ids + row, mask=scored, other=0)
    held = scored & (id >= 0) & (id < width * RANKS)
    z = tl.load(parts + (id // width * rows + row) * 3 + 2, mask=held, other=float("nan"))
    tl.store(lse + row, tl.where(scored, row_lse, 0.0), mask=real)
    tl.store(logp + row, tl.where(scored, z - row_lse, 0.0), mask=real)


@triton.jit(do_not_specialize=["first", "columns", "limit"])
def _slopes(
    logits, ids, temperature, support, active, lse, seed, dlogits, row_stride, support_stride, first, columns, limit,
    BLOCK: tl.constexpr, SUPPORT: tl.constexpr, ACTIVE: tl.constexpr,
):  # fmt: skip
    """dlogits [rows, columns], bf16 values, of the logits from column ``first`` on. Grid: (rows, blocks)."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = first + place
    if ACTIVE:
        limit = tl.where(tl.load(active + row) != 0, limit, 0)
    inside = (place < columns) & (column < limit)
    if SUPPORT != "":
        inside = _supported(support, row, support_stride, column, inside, SUPPORT)
    t = tl.load(temperature + row)
    z = tl.load(logits + row * row_stride + place, mask=inside, other=0.0)
    p = exp(tl.div_rn(z, t) - tl.load(lse + row))
    hit = tl.where(column == tl.load(ids + row), 1.0, 0.0)
    slope = with_quiet_nan(tl.div_rn(tl.load(seed + row) * (hit - p), t), tl.bfloat16)
    slope = tl.where(inside, slope.to(tl.float32), 0.0)
    tl.store(dlogits + row * columns + place, slope.to(dlogits.dtype.element_ty), mask=place < columns)


class Rows:
    """What belongs to each row, and the states of its vocabulary tiles as they come in."""

    def __init__(
        self, op: str, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None, active: torch.Tensor | None, limit: int
    ) -> None:
        """limit: columns beyond it are off the support. op: the name that is read back."""
        self.op, self.limit = op, limit
        self.ids, self.temperature = ids.contiguous(), temperature.contiguous()
        self.bits = support is not None and support.dtype == torch.uint8
        self.support = None if support is None else _unit_columns(support).view(torch.uint8)
        self.active = _bytes(active)

    def _masks(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """support, active and the stride of support; an absent one is not read."""
        support = self.ids if self.support is None else self.support
        return support, self.ids if self.active is None else self.active, support.stride(0)

    def _flags(self) -> dict[str, Any]:
        kind = "" if self.support is None else "bits" if self.bits else "mask"
        return {"SUPPORT": kind, "ACTIVE": self.active is not None}

    def start(self, padded_vocab: int, shards: int, vocab_tile: int) -> None:
        """Make room for the states of every tile."""
        rows, self.shard, self.tile = len(self.ids), padded_vocab // shards, vocab_tile
        self.shards, self.tiles = shards, triton.cdiv(self.shard, vocab_tile)
        make = lambda *shape: self.temperature.new_empty(shape)
        self.top, self.total = make(rows, self.tiles, shards), make(rows, self.tiles, shards)
        self.selected = make(rows)

    def add(
        self, logits: torch.Tensor, first: int, shard: int, shards: int, each: int | None = None, warps: int | None = None
    ) -> None:  # fmt: skip
        """Take the states of ``shards`` shards from number ``shard`` on; logits: [rows, columns from ``first`` on] fp32.

        each, warps: tiles and warps of one program, None for the choice by the number of rows: few tiles take more warps each.
        """
        rows = len(self.ids)
        if not rows:
            return
        processor_tiles = rows * shards * self.tiles // processors(self.ids.device)
        block = triton.next_power_of_2(min(self.tile, self.shard))
        line = min(block, 128)
        each = each or max(1, min(8, processor_tiles // 64))
        warps = warps or (4 if processor_tiles < 32 else 2 if processor_tiles < 256 else 1)
        support, active, support_stride = self._masks()
        SOURCE.launch(
            _tile_states, (rows, triton.cdiv(self.tiles, each), shards),
            logits, self.ids, self.temperature, support, active, self.selected, self.top, self.total, logits.stride(0), support_stride,
            first, shard, self.shards, self.tiles, self.limit, op=self.op, warps=warps, stages=2, SHARD=self.shard, TILE=self.tile,
            LINES=block // line, LINE=line, EACH=each, **self._flags(),
        )  # fmt: skip

    def part(self) -> torch.Tensor:
        """(max, sum, z/T of the row's id) [rows, 3] fp32 once every shard's states are there."""
        part = self.temperature.new_empty(len(self.ids), 3)
        self._merge(part, part, part, whole=False)
        return part

    def score(self) -> tuple[torch.Tensor, torch.Tensor]:
        """logp and LSE [rows] fp32 once every shard's states are there, and these are all shards."""
        logp, lse = self.temperature.new_empty(len(self.ids)), self.temperature.new_empty(len(self.ids))
        self._merge(logp, logp, lse, whole=True)
        return logp, lse

    def _merge(self, part: torch.Tensor, logp: torch.Tensor, lse: torch.Tensor, *, whole: bool) -> None:
        rows = len(self.ids)
        if rows:
            support, active, support_stride = self._masks()
            SOURCE.launch(
                _part, (triton.cdiv(rows, 4),), self.ids, self.temperature, support, active, self.selected, self.top, self.total, part,
                logp, lse, support_stride, rows, self.tiles, self.limit, op=None, warps=1, SHARD=self.shard, SHARDS=self.shards, BLOCK=4,
                AHEAD=min(8, triton.next_power_of_2(self.tiles)), WHOLE=whole, **self._flags(),
            )  # fmt: skip

    def slopes(
        self, logits: torch.Tensor, first: int, lse: torch.Tensor, seed: torch.Tensor, dtype: torch.dtype, block: int = SLOPES
    ) -> torch.Tensor:
        """dlogits of ``logits`` [rows, columns from ``first`` on] in ``dtype``, fp32 or bf16; +0 beyond the limit."""
        rows, columns = logits.shape
        dlogits = logits.new_empty(logits.shape, dtype=dtype)
        if rows and columns:
            support, active, support_stride = self._masks()
            SOURCE.launch(
                _slopes, (rows, triton.cdiv(columns, block)), logits, self.ids, self.temperature, support, active, lse.contiguous(),
                seed.contiguous(), dlogits, logits.stride(0), support_stride, first, columns, self.limit, op=self.op, warps=4,
                BLOCK=block, **self._flags(),
            )  # fmt: skip
        return dlogits


def _unit_columns(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _bytes(active: torch.Tensor | None) -> torch.Tensor | None:
    return None if active is None else active.contiguous().view(torch.uint8)


def part(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None, active: torch.Tensor | None,
    columns: Columns, vocab_tile: int,
) -> torch.Tensor:  # fmt: skip
    rows = Rows("logp", ids - columns.first, temperature, support, active, columns.real)
    rows.start(columns.width, columns.shards, vocab_tile)
    rows.add(_unit_columns(logits), 0, 0, columns.shards)
    return rows.part()


def join(parts: torch.Tensor, ids: torch.Tensor, active: torch.Tensor | None, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, rows, _ = parts.shape
    logp, lse = parts.new_empty(rows), parts.new_empty(rows)
    if rows:
        scored = _bytes(active)
        SOURCE.launch(
            _join, (triton.cdiv(rows, 32),), parts.contiguous(), ids.contiguous(), ids if scored is None else scored, logp, lse, rows,
            width, op=None, warps=1, RANKS=ranks, BLOCK=32, ACTIVE=scored is not None,
        )  # fmt: skip
    return logp, lse


def part_gradient(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None, active: torch.Tensor | None,
    lse: torch.Tensor, seed: torch.Tensor, columns: Columns,
) -> torch.Tensor:  # fmt: skip
    rows = Rows("logp.backward", ids - columns.first, temperature, support, active, columns.real)
    return rows.slopes(_unit_columns(logits), 0, lse, seed, torch.float32)


@cpu.logp.register_kernel("cuda")
def run_logp(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None, active: torch.Tensor | None,
    vocab_size: int, padded_vocab: int, shards: int, vocab_tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    rows = Rows("logp", ids, temperature, support, active, min(vocab_size, logits.shape[1]))
    rows.start(padded_vocab, shards, vocab_tile)
    rows.add(_unit_columns(logits), 0, 0, shards)
    return rows.score()


@cpu.logp_backward.register_kernel("cuda")
def run_backward(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None, active: torch.Tensor | None,
    lse: torch.Tensor, seed: torch.Tensor, vocab_size: int,
) -> torch.Tensor:  # fmt: skip
    rows = Rows("logp.backward", ids, temperature, support, active, min(vocab_size, logits.shape[1]))
    return rows.slopes(_unit_columns(logits), 0, lse, seed, torch.float32)


logp = differentiable(run_logp, cpu.setup, partial(cpu.backward, run_backward))


def examples() -> None:
    """Calls for the ahead-of-time harness: Qwen3's vocabulary whole and over supports, forward and backward."""
    with torch.device("meta"):
        logits, ids = torch.empty(4096, 151936), torch.empty(4096, dtype=torch.int64)
        temperature, support = torch.empty(4096), torch.empty(4096, 151936, dtype=torch.bool)
        bits = torch.empty(4096, 152576 // 8, dtype=torch.uint8)
        for mask in (None, support, bits):
            _, lse = run_logp(logits, ids, temperature, mask, None, 151936, 152576, 8, 1024)
            run_backward(logits, ids, temperature, mask, None, lse, temperature, 151936)
        columns = Columns(0, 4, 19072, 151936)
        part_logits = torch.empty(4096, columns.width)
        parts = part(part_logits, ids, temperature, None, None, columns, 1024)
        join(torch.stack((parts, parts)), ids, None, columns.width)
