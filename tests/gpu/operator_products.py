"""On a card: the orders of det_gemm for every tile, the vendor's library with split-K off, and the faults that these checks must see."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from report import Report

from rlk.contract.models import QWEN3_8B
from rlk.contract.orders import fold_pairs
from rlk.contract.topology import token_leaves
from rlk.kernels._triton import aot
from rlk.kernels._triton.launch import Launch, recorded
from rlk.kernels.det_gemm import triton as gemm
from rlk.kernels.det_gemm.triton_tiles import Tile
from rlk.kernels.det_gemm.vendor import split_k_off

CHAIN = Tile(64, 64, 64, 4, 3)
"""The tile whose bytes are the measure of all others."""
PRODUCT_TILES = (
    Tile(16, 32, 256, 4, 3),
    Tile(16, 64, 128, 4, 3),
    Tile(32, 32, 256, 4, 3),
    Tile(64, 32, 128, 4, 4),
    Tile(128, 64, 64, 4, 4),
    Tile(128, 128, 32, 4, 2),
    Tile(128, 64, 64, 8, 3, True),
    Tile(64, 128, 32, 4, 4, True, 4, 2),
    Tile(128, 128, 64, 8, 3, True, 4),
    Tile(128, 256, 64, 8, 4, True),
)
TOKEN_TILES = (
    Tile(64, 64, 32, 4, 3),
    Tile(128, 128, 64, 8, 4, True, 4),
    Tile(64, 128, 64, 4, 4, True, 4, 2),
    Tile(128, 64, 64, 4, 4, True, 4, 2),
)
PLAIN_CANDIDATES = {
    1: (Tile(16, 32, 256, 4, 4), Tile(16, 32, 256, 4, 5), Tile(16, 32, 512, 4, 3)),
    64: (Tile(64, 32, 128, 4, 4), Tile(64, 32, 128, 4, 6)),
    128: (Tile(128, 64, 64, 4, 6), Tile(64, 64, 128, 4, 4), Tile(64, 64, 64, 4, 6, True, 0, 2)),
    256: (Tile(128, 64, 64, 4, 6), Tile(128, 128, 64, 8, 5, True)),
    512: (Tile(128, 256, 64, 8, 4, True), Tile(128, 128, 64, 8, 5, True)),
    2048: (Tile(128, 256, 64, 8, 4, True), Tile(256, 128, 64, 8, 4, True)),
}
SPLIT_CANDIDATES = {
    128: (
        (Tile(128, 64, 64, 4, 4), False),
        (Tile(64, 64, 64, 4, 3, True, 0, 2), True),
    ),
    256: (
        (Tile(128, 64, 64, 4, 4), False),
        (Tile(128, 64, 64, 8, 3, True), True),
        (Tile(64, 64, 64, 4, 3, True, 0, 2), True),
    ),
    512: (
        (Tile(128, 128, 64, 8, 3, True, 4), True),
        (Tile(128, 128, 64, 8, 3, True, 8), True),
        (Tile(128, 64, 64, 8, 3, True), True),
    ),
    2048: ((Tile(128, 128, 64, 8, 3, True, 4), True), (Tile(128, 128, 64, 8, 3, True, 8), True)),
}
ROWS = (1, 2, 7, 16, 17, 31, 33, 59, 64, 65, 127, 128, 129, 255, 257, 512)
VENDOR_ROWS = (*ROWS, 1024, 2048, 4096)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda").bfloat16()


def run(a: torch.Tensor, b: torch.Tensor, transposed: bool, splits: int, tile: Tile, whole: bool, dtype: torch.dtype) -> torch.Tensor:
    """a·bᵀ (a·b when transposed) by one tile."""
    columns = b.shape[1] if transposed else b.shape[0]
    out = torch.full((a.shape[0], columns), float("nan"), dtype=dtype, device=a.device)
    gemm.contract("det_gemm", a, b, transposed, splits, out, tile, whole)
    return out


def _tile_cases() -> Iterator[tuple[bool, int, Tile, bool]]:
    for transposed, splits, tile in itertools.product((False, True), (1, 8), PRODUCT_TILES):
        for whole in (True, False):
            large = tile.rows * tile.columns > 128 * 128 or (tile.rows >= 128 and not tile.descriptors)
            if (splits == 1 and not whole) or (splits > 1 and whole and large):
                continue  # no row of the table holds all leaves of so large a tile
            yield transposed, splits, tile, whole


def precompile() -> list[str]:
    """Fill Triton's cache on all cores, before this process touches the card. For each distinct launch "" or why it does not compile."""
    asked: list[Launch] = []
    candidates = [(False, 1, tile, True) for tiles in PLAIN_CANDIDATES.values() for tile in tiles]
    candidates += [(False, 8, tile, whole) for options in SPLIT_CANDIDATES.values() for tile, whole in options]
    with torch.device("meta"):
        make = lambda *size: torch.empty(*size, dtype=torch.bfloat16)
        for dtype in (torch.bfloat16, torch.float32):
            for transposed, splits, tile, whole in (*_tile_cases(), *(candidates if dtype == torch.bfloat16 else ())):
                with recorded("cuda") as launches:
                    for rows in (33, 64):
                        out = torch.empty(rows, 1536, dtype=dtype)
                        b = make(4096, 1536) if transposed else make(1536, 4096)
                        gemm.contract("det_gemm", make(rows, 4096), b, transposed, splits, out, tile, whole)
                asked += launches
        index, offsets = torch.empty(4096, dtype=torch.int64), torch.empty(9, dtype=torch.int64)
        for tile in TOKEN_TILES:
            with recorded("cuda") as launches:
                gemm.weight_grad("det_gemm.weight_grad", make(64, 4096), make(64, 1536), index, offsets, tile)
            asked += launches
    distinct = {(launch.kernel.__name__, repr(aot._specialised(launch, aot.TARGETS["cuda:90"])[:4])): launch for launch in asked}
    with ProcessPoolExecutor(
        os.cpu_count(), mp_context=get_context("fork"), initializer=_keep, initargs=(list(distinct.values()),)
    ) as pool:
        return list(pool.map(_compile_kept, range(len(distinct))))


_kept: list[Launch] = []


def _keep(launches: list[Launch]) -> None:
    _kept[:] = launches


def _compile_kept(at: int) -> str:
    try:
        aot.compile_launch(_kept[at], "cuda:90")
    except Exception as error:
        return f"{_kept[at].kernel.__name__} {_kept[at].constants}: {error!r}"
    return ""


def tiles(report: Report) -> None:
    """Every tile gives the chain's bytes; split order is the pair tree of its leaves; every neighbour leaves a row alone."""
    torch.manual_seed(0)
    for rows in ROWS:
        x, w, v = random(rows, 4096), random(1536, 4096), random(4096, 1536)
        expected: dict[tuple[bool, int], torch.Tensor] = {}
        for transposed, b in ((False, w), (True, v)):
            for splits in (1, 8):
                depth = 4096 // splits
                parts = [
                    run(
                        x[:, i : i + depth],
                        b[i : i + depth] if transposed else b[:, i : i + depth],
                        transposed,
                        1,
                        CHAIN,
                        True,
                        torch.float32,
                    )
                    for i in range(0, 4096, depth)
                ]
                expected[transposed, splits] = fold_pairs(parts, torch.add)
        for transposed, splits, tile, whole in _tile_cases():
            b, total = v if transposed else w, expected[transposed, splits]
            case = f"M{rows} {'dy·w' if transposed else 'x·wᵀ'} {splits} {tile} {whole}"
            report.same("det_gemm: every tile, fp32", case, run(x, b, transposed, splits, tile, whole, torch.float32), total)
            report.same("det_gemm: every tile, bf16", case, run(x, b, transposed, splits, tile, whole, torch.bfloat16), total.bfloat16())
        whole_batch = gemm.product("det_gemm", x, w, 1, torch.float32)
        for i in {0, rows // 2, rows - 1}:
            alone = gemm.product("det_gemm", x[i : i + 1], w, 1, torch.float32)
            report.same("det_gemm: a row alone", f"M{rows} row {i}", alone, whole_batch[i : i + 1])


def tokens(report: Report) -> None:
    """Weight gradients: every tile, against the leaves one after the other in plain order."""
    torch.manual_seed(0)
    for lengths in ((11, 16, 13, 19), (1,), (300, 7, 129), (1024, 1000)):
        leaves = token_leaves(lengths)
        index, offsets = torch.tensor(leaves.index, device="cuda"), torch.tensor(leaves.offsets, device="cuda")
        x, dy = random(sum(lengths), 512), random(sum(lengths), 384)
        parts = []
        for first, last in itertools.pairwise(leaves.offsets):
            named = index[first:last]
            a, b = (torch.where((named >= 0)[:, None], rows[named.clamp(min=0)], 0) for rows in (dy, x))
            part = torch.zeros(384, 512, device="cuda")
            parts.append(run(a.T.contiguous(), b, True, 1, CHAIN, True, torch.float32) if len(named) else part)
        for tile in TOKEN_TILES:
            found = gemm.weight_grad("det_gemm.weight_grad", x, dy, index, offsets, tile)
            report.same("det_gemm: weight gradient, every tile", f"{lengths} {tile}", found, fold_pairs(parts, torch.add))


def vendor(report: Report) -> None:
    """Plain order equals cuBLASLt with split-K off on the linear layers of Qwen3-8B and their eighths; the default library does not."""
    torch.manual_seed(0)
    shapes = {(g.n // a, g.k // b) for g in QWEN3_8B.gemms()[:-1] for a, b in ((1, 1), (8, 1), (1, 8))} | {(19072, 4096)}
    for n, k in sorted(shapes):
        w = random(n, k)
        for rows in VENDOR_ROWS:
            x = random(rows, k)
            with split_k_off():
                theirs = torch.nn.functional.linear(x, w)
            ours = gemm.product("det_gemm", x, w, 1, x.dtype)
            if rows == 1:  # the library may take another kernel for one row of few columns: found, not required
                report.holds("cuBLASLt with split-K off at one row: differing", True, **{f"K{k} N{n}": int((ours != theirs).sum())})
            else:
                report.same("det_gemm equals cuBLASLt with split-K off, from two rows", f"M{rows} K{k} N{n}", ours, theirs)
    x, w = random(512, 12288), random(4096, 12288)
    alone, among = torch.nn.functional.linear(x[:1], w), torch.nn.functional.linear(x, w)[:1]
    report.differs("default cuBLAS, row 0 alone and among 512 rows of down_proj", alone, among)
    report.differs("split order against plain order", *(gemm.product("det_gemm", x, w, splits, x.dtype) for splits in (1, 8)))
    report.differs("four leaves for eight", *(gemm.product("det_gemm", x, w, splits, x.dtype) for splits in (4, 8)))
    shifted = torch.nn.functional.pad(x, (1, 0))[:, :-1].contiguous(), torch.nn.functional.pad(w, (1, 0))[:, :-1].contiguous()
    x[:, -1] = 0
    report.differs(
        "a group edge moved by one", gemm.product("det_gemm", x, w, 1, torch.float32), gemm.product("det_gemm", *shifted, 1, torch.float32)
    )
