"""Triton backend of det_gemm: one fp32 accumulator per leaf, fed by a chain of matrix instructions in ascending k.

The instruction adds a group of 16 products at once whatever the tile, so every tile gives the same bytes as long as a leaf starts a new
accumulator and its tail is filled with +0. Leaves are joined by the tree of adjacent pairs, in registers or, where there are few rows,
from an fp32 workspace that separate programs filled. On Hopper some shapes run kernels in CUDA C++ instead (``sm90``).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.fold import fold_leaves
from rlk.kernels._triton.launch import platform, processors
from rlk.kernels._triton.numerics import with_quiet_nan
from rlk.kernels.det_gemm import cpu, sm90, sm90_tokens
from rlk.kernels.det_gemm.operators import register_device
from rlk.kernels.det_gemm.sm90_plans import product_plan
from rlk.kernels.det_gemm.triton_tiles import Tile, product_tile, token_tile

SOURCE = TritonSource("det_gemm")
_GATHER_BLOCK = 2048


@triton.jit
def _place(tile, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(row, column) of the first element of output tile number ``tile``: bands of 8 tiles high, so that operands stay in the cache."""
    down, across = tl.cdiv(rows, ROWS), tl.cdiv(columns, COLUMNS)
    top = tile // (8 * across) * 8
    height = min(down - top, 8)
    inside = tile % (8 * across)
    return (top + inside % height) * ROWS, inside // height * COLUMNS


@triton.jit
def _store(out, value, row, column, rows, columns):
    to = out + row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(to, with_quiet_nan(value, out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@triton.jit
def _leaf(
    a, b, row, column, first, depth, rows, columns, a_row, b_column, b_depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, DEPTH)
    a_at = a + row[:, None].to(tl.int64) * a_row + (first + k)[None, :]
    b_at = b + column[None, :].to(tl.int64) * b_column + (first + k)[:, None].to(tl.int64) * b_depth
    a_inside, b_inside = (row < rows)[:, None], (column < columns)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, depth, DEPTH):
        if WHOLE:
            x, y = tl.load(a_at, mask=a_inside, other=0.0), tl.load(b_at, mask=b_inside, other=0.0)
        else:
            within = start + k < depth
            x = tl.load(a_at, mask=a_inside & within[None, :], other=0.0)
            y = tl.load(b_at, mask=b_inside & within[:, None], other=0.0)
        total = tl.dot(x, y, total)
        a_at += DEPTH
        b_at += DEPTH * b_depth
    return total


@triton.jit
def _leaves(
    a, b, row, column, first, depth, rows, columns, a_row, b_column, b_depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """Pair tree over LEAVES leaves of ``depth`` from position ``first``: one loop per leaf, so that each is pipelined."""
    if LEAVES == 1:
        return _leaf(
            a, b, row, column, first, depth, rows, columns, a_row, b_column, b_depth, ROWS, COLUMNS, DEPTH, WHOLE,
        )  # fmt: skip
    else:  # noqa: RET505
        half: tl.constexpr = LEAVES // 2
        left = _leaves(
            a, b, row, column, first, depth, rows, columns, a_row, b_column, b_depth, ROWS, COLUMNS, DEPTH, WHOLE, half,
        )  # fmt: skip
        right = _leaves(
            a, b, row, column, first + half * depth, depth, rows, columns, a_row, b_column, b_depth, ROWS, COLUMNS, DEPTH, WHOLE, half,
        )  # fmt: skip
        return left + right


@triton.jit(do_not_specialize=["rows"])
def _product(
    a, b, out, rows, columns, depth, a_row, b_column, b_depth,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """out[part] = pair tree of leaves part·LEAVES … of a·bᵀ; a: [rows, k] with unit stride along k, b: any strides."""
    first_row, first_column = _place(tl.program_id(0), rows, columns, ROWS, COLUMNS)
    row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
    part = tl.program_id(1)
    total = _leaves(
        a, b, row, column, part * LEAVES * depth, depth, rows, columns, a_row, b_column, b_depth, ROWS, COLUMNS, DEPTH, WHOLE, LEAVES,
    )  # fmt: skip
    _store(out + part.to(tl.int64) * rows * columns, total, row, column, rows, columns)


@triton.jit
def _park(desk, value):
    """Put a finished subtree down in the program's own fp32 workspace, so that registers are left for the leaf under way."""
    tl.debug_barrier()
    tl.store(desk, value)
    tl.debug_barrier()


@triton.jit
def _pieces(a, b, row, column, k, TRANSPOSED: tl.constexpr, TOKENS: tl.constexpr):
    """[ROWS, DEPTH] of a and [DEPTH, COLUMNS] of b from position k; a lies [k, rows] for TOKENS, b [k, columns] if TRANSPOSED."""
    x = a.load([k, row]).T if TOKENS else a.load([row, k])
    y = b.load([k, column]) if TRANSPOSED else b.load([column, k]).T
    return x, y


@triton.jit
def _described_leaves(
    a, b, offsets, desk, row, column, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr, TOKENS: tl.constexpr, FIRST: tl.constexpr, LEAVES: tl.constexpr, PARK: tl.constexpr,
):  # fmt: skip
    if LEAVES == 1:
        first = _edge(offsets, FIRST, DEPTH).to(tl.int32) if TOKENS else FIRST * depth
        last = _edge(offsets, FIRST + 1, DEPTH).to(tl.int32) if TOKENS else first + depth
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(first, last, DEPTH):
            x, y = _pieces(a, b, row, column, k, TRANSPOSED, TOKENS)
            total = tl.dot(x, y, total)
        return total
    elif LEAVES == 2 and not TOKENS:  # noqa: RET505
        # Two leaves of one depth side by side: half as many loops to fill and drain, and registers for both are needed anyway.
        left, right = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(FIRST * depth, FIRST * depth + depth, DEPTH):
            x, y = _pieces(a, b, row, column, k, TRANSPOSED, TOKENS)
            left = tl.dot(x, y, left)
            x, y = _pieces(a, b, row, column, k + depth, TRANSPOSED, TOKENS)
            right = tl.dot(x, y, right)
        return left + right
    else:
        half: tl.constexpr = LEAVES // 2
        left = _described_leaves(
            a, b, offsets, desk + ROWS * COLUMNS, row, column, depth, ROWS, COLUMNS, DEPTH, TRANSPOSED, TOKENS, FIRST, half, PARK,
        )  # fmt: skip
        if LEAVES >= PARK:
            _park(desk, left)
        right = _described_leaves(
            a, b, offsets, desk + ROWS * COLUMNS, row, column, depth, ROWS, COLUMNS, DEPTH, TRANSPOSED, TOKENS, FIRST + half, half, PARK,
        )  # fmt: skip
        if LEAVES >= PARK:
            left = tl.load(desk)
        return left + right


@triton.jit(do_not_specialize=["rows"])
def _described_product(
    a, b, offsets, out, desks, rows, columns, depth, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    TRANSPOSED: tl.constexpr, TOKENS: tl.constexpr, LEAVES: tl.constexpr, PARK: tl.constexpr,
):  # fmt: skip
    """_product through tensor descriptors, for leaves of whole tiles of depth: of ``depth`` each, or gathered tokens (see _gather)."""
    desk = _desk(desks, ROWS, COLUMNS, LEAVES, PARK)
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        row, column = _place(tile, rows, columns, ROWS, COLUMNS)
        total = _described_leaves(
            a, b, offsets, desk, row, column, depth, ROWS, COLUMNS, DEPTH, TRANSPOSED, TOKENS, 0, LEAVES, PARK,
        )  # fmt: skip
        _store(out, total, row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS), rows, columns)


@triton.jit
def _edge(offsets, LEAF: tl.constexpr, DEPTH: tl.constexpr):
    """First gathered row of leaf LEAF: leaves are filled to whole tiles of DEPTH."""
    edge = tl.zeros((), tl.int64)
    for leaf in tl.static_range(LEAF):
        edge += tl.cdiv(tl.load(offsets + leaf + 1) - tl.load(offsets + leaf), DEPTH) * DEPTH
    return edge


@triton.jit
def _gather(source, index, offsets, gathered, stride, width, DEPTH: tl.constexpr, LEAVES: tl.constexpr, BLOCK: tl.constexpr):
    """gathered = the rows of ``source`` in leaf order, each leaf filled with +0 to whole tiles of DEPTH."""
    at, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    position, edge = tl.full((1,), -1, tl.int64), tl.zeros((1,), tl.int64)
    for leaf in tl.static_range(LEAVES):
        first, last = tl.load(offsets + leaf), tl.load(offsets + leaf + 1)
        named = at - edge + first
        position = tl.where((at >= edge) & (named < last), named, position)
        edge += tl.cdiv(last - first, DEPTH) * DEPTH
    token = tl.load(index + position, mask=position >= 0, other=-1)
    value = tl.load(source + token * stride + column, mask=(column < width) & (token >= 0), other=0.0)
    tl.store(gathered + at * width + column, value, mask=column < width)


@triton.jit
def _desk(desks, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LEAVES: tl.constexpr, PARK: tl.constexpr):
    """The first of this program's workspace tiles, one per level of the tree at which it parks."""
    element = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return desks + tl.program_id(0) * (LEAVES // PARK * ROWS * COLUMNS) + element


@triton.jit
def _token_leaves(
    dy, x, index, offsets, desk, row, column, rows, columns, dy_token, x_token,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, FIRST: tl.constexpr, LEAVES: tl.constexpr, PARK: tl.constexpr,
):  # fmt: skip
    if LEAVES == 1:
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        last = tl.load(offsets + FIRST + 1)
        for start in range(tl.load(offsets + FIRST), last, DEPTH):
            at = start + tl.arange(0, DEPTH)
            token = tl.load(index + at, mask=at < last, other=-1)
            real = (token >= 0)[:, None]
            grad = tl.load(dy + token[:, None] * dy_token + row[None, :], mask=real & (row < rows)[None, :], other=0.0)
            value = tl.load(x + token[:, None] * x_token + column[None, :], mask=real & (column < columns)[None, :], other=0.0)
            total = tl.dot(grad.T, value, total)
        return total
    else:  # noqa: RET505
        half: tl.constexpr = LEAVES // 2
        next_desk = desk + ROWS * COLUMNS
        left = _token_leaves(
            dy, x, index, offsets, next_desk, row, column, rows, columns, dy_token, x_token, ROWS, COLUMNS, DEPTH, FIRST, half, PARK,
        )  # fmt: skip
        if LEAVES >= PARK:
            _park(desk, left)
        right = _token_leaves(
            dy, x, index, offsets, next_desk, row, column, rows, columns, dy_token, x_token,
            ROWS, COLUMNS, DEPTH, FIRST + half, half, PARK,
        )  # fmt: skip
        if LEAVES >= PARK:
            left = tl.load(desk)
        return left + right


@triton.jit
def _token_product(
    dy, x, index, offsets, out, desks, rows, columns, dy_token, x_token,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, LEAVES: tl.constexpr, PARK: tl.constexpr,
):  # fmt: skip
    """out[rows, columns] = dyᵀ·x in token order. Leaves start and end at whole groups, so a tile of tokens past a leaf's end is +0."""
    desk = _desk(desks, ROWS, COLUMNS, LEAVES, PARK)
    tiles = tl.cdiv(rows, ROWS) * tl.cdiv(columns, COLUMNS)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        first_row, first_column = _place(tile, rows, columns, ROWS, COLUMNS)
        row, column = first_row + tl.arange(0, ROWS), first_column + tl.arange(0, COLUMNS)
        total = _token_leaves(
            dy, x, index, offsets, desk, row, column, rows, columns, dy_token, x_token, ROWS, COLUMNS, DEPTH, 0, LEAVES, PARK,
        )  # fmt: skip
        _store(out, total, row, column, rows, columns)


def contract(op: str, a: torch.Tensor, b: torch.Tensor, transposed: bool, splits: int, out: torch.Tensor, tile: Tile, whole: bool) -> None:
    """out = a·bᵀ (a·b when transposed), contracted in ``splits`` leaves, with a given tile. ``whole``: a program joins all leaves."""
    rows, columns = out.shape
    depth = a.shape[1] // splits
    whole_tiles = depth % tile.depth == 0
    if tile.descriptors and whole and whole_tiles and _describable(a) and _describable(b):
        block = (tile.depth, tile.columns) if transposed else (tile.columns, tile.depth)
        operands = TensorDescriptor.from_tensor(a, [tile.rows, tile.depth]), TensorDescriptor.from_tensor(b, list(block))
        programs, desks, shape = _going_on(out, tile, splits)
        SOURCE.launch(
            _described_product, programs, *operands, None, out, desks, rows, columns, depth, op=op,
            TRANSPOSED=transposed, TOKENS=False, **shape,
        )  # fmt: skip
        return
    parts = out if whole else out.new_empty(splits, rows, columns, dtype=torch.float32)
    strides = (b.stride(1), b.stride(0)) if transposed else b.stride()
    grid = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns), 1 if whole else splits
    SOURCE.launch(
        _product, grid, a, b, parts, rows, columns, depth, a.stride(0), *strides, op=op, warps=tile.warps, stages=tile.stages,
        ROWS=tile.rows, COLUMNS=tile.columns, DEPTH=tile.depth, WHOLE=whole_tiles, LEAVES=splits if whole else 1,
    )  # fmt: skip
    if not whole:
        fold_leaves(SOURCE, parts, out)


def _going_on(out: torch.Tensor, tile: Tile, leaves: int) -> tuple[tuple[int], torch.Tensor, dict[str, int]]:
    """Grid, workspace and constants of a kernel whose programs go on from output tile to output tile."""
    tiles = triton.cdiv(out.shape[0], tile.rows) * triton.cdiv(out.shape[1], tile.columns)
    programs = min(tiles, tile.resident * processors(out.device))
    park = tile.park or 2 * leaves
    desks = out.new_empty(programs, leaves // park, tile.rows, tile.columns, dtype=torch.float32)
    shape = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "LEAVES": leaves, "PARK": park}
    return (programs,), desks, {**shape, "warps": tile.warps, "stages": tile.stages}


def _describable(x: torch.Tensor) -> bool:
    """Whether the copy engine can read x: 16-byte aligned rows."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def _contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """x with unit stride along its rows; a slice of columns stays where it is."""
    return x if x.stride(1) == 1 else x.contiguous()


def product(op: str, x: torch.Tensor, w: torch.Tensor, splits: int, out_dtype: torch.dtype) -> torch.Tensor:
    """x·wᵀ: [T, K] and [N, K] to [T, N], contracted over K in ``splits`` leaves."""
    out = x.new_empty(x.shape[0], w.shape[0], dtype=out_dtype)
    _contract_by_shape(op, _contiguous_rows(x), _contiguous_rows(w), False, splits, out)
    return out


def input_grad(op: str, dy: torch.Tensor, w: torch.Tensor, splits: int, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """dy·w: [T, N] and [N, K] to [T, K], contracted over N in ``splits`` leaves."""
    out = w.new_empty(dy.shape[0], w.shape[1], dtype=out_dtype)
    _contract_by_shape(op, _contiguous_rows(dy.to(w.dtype)), _contiguous_rows(w), True, splits, out)
    return out


def _contract_by_shape(op: str, a: torch.Tensor, b: torch.Tensor, transposed: bool, splits: int, out: torch.Tensor) -> None:
    """out = a·bᵀ (a·b when transposed) by the row of the tables for this card and shape; every row gives the same bytes."""
    depth = a.shape[1] // splits
    rows, columns = out.shape
    plan = product_plan(rows, columns, splits, transposed) if sm90.takes(a, b, out, splits, depth) else None
    if plan:
        sm90.contract(op, a, b, transposed, splits, out, plan)
    else:
        tile, whole = product_tile(platform(), rows, columns, depth, splits)
        contract(op, a, b, transposed, splits, out, tile, whole)


def weight_grad(
    op: str, x: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, tile: Tile | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """dyᵀ·x: [T, K] and [T, N] to [N, K] fp32, contracted over tokens in leaf order; by Triton if a tile is given.

    out: contiguous [N, K] fp32 that takes the result.
    """
    x, dy, index, offsets = _contiguous_rows(x), _contiguous_rows(dy), index.contiguous(), offsets.contiguous()
    rows, columns = dy.shape[1], x.shape[1]
    describable = rows * dy.element_size() % 16 == 0 and columns * x.element_size() % 16 == 0
    out = x.new_empty(rows, columns, dtype=torch.float32) if out is None else out
    if not tile and sm90_tokens.takes(x, dy, offsets.numel() - 1):
        if gathered := sm90_tokens.short_runs(index, x.shape[0]):
            x, dy = (_gathered(source, index, offsets, 1)[: index.numel()] for source in (x, dy))
        sm90_tokens.weight_grad(op, x, dy, None if gathered else index, offsets, out)
        return out
    tile = tile or token_tile(platform(), describable)
    programs, desks, shape = _going_on(out, tile, offsets.numel() - 1)
    if tile.descriptors and describable:
        a, b = (_gathered(source, index, offsets, tile.depth) for source in (dy, x))
        operands = TensorDescriptor.from_tensor(a, [tile.depth, tile.rows]), TensorDescriptor.from_tensor(b, [tile.depth, tile.columns])
        SOURCE.launch(
            _described_product, programs, *operands, offsets, out, desks, rows, columns, 0, op=op, TRANSPOSED=True, TOKENS=True, **shape
        )  # fmt: skip
    else:
        tensors = dy, x, index, offsets, out, desks
        SOURCE.launch(_token_product, programs, *tensors, rows, columns, dy.stride(0), x.stride(0), op=op, **shape)
    return out


def _gathered(source: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, depth: int) -> torch.Tensor:
    """Rows of ``source`` in leaf order; the last rows stay unwritten, and unread, if the leaves need fewer."""
    leaves, width = offsets.numel() - 1, source.shape[1]
    gathered = source.new_empty(index.numel() + leaves * depth, width)
    grid = gathered.shape[0], triton.cdiv(width, _GATHER_BLOCK)
    constants = {"DEPTH": depth, "LEAVES": leaves, "BLOCK": _GATHER_BLOCK}
    SOURCE.launch(_gather, grid, source, index, offsets, gathered, source.stride(0), width, op=None, **constants)
    return gathered


det_gemm, det_gemm_input_part, det_gemm_weight_grad, _ = register_device("det_gemm", cpu.OPERATORS, "cuda", sys.modules[__name__])


def examples() -> None:
    """Calls for the ahead-of-time harness: linear layers of Qwen3-8B at few and many rows in each order, a depth that fits no tile."""
    with torch.device("meta"):
        make = lambda *shape: torch.empty(*shape, dtype=torch.bfloat16)
        for rows in (1, 64, 2048):
            product("det_gemm", make(rows, 4096), make(6144, 4096), 1, torch.bfloat16)
            product("det_gemm", make(rows, 12288), make(4096, 12288), 8, torch.bfloat16)
        input_grad("det_gemm.input_grad", make(2048, 4096), make(4096, 12288), 1)
        product("det_gemm", make(59, 72), make(40, 72), 1, torch.float32)
        index, offsets = torch.empty(4096, dtype=torch.int64), torch.empty(9, dtype=torch.int64)
        weight_grad("det_gemm.weight_grad", make(4096, 4096), make(4096, 6144), index, offsets)
        weight_grad("det_gemm.weight_grad", make(64, 100), make(64, 90), index, torch.empty(3, dtype=torch.int64))
