"""Compares the oracle of Hopper's matrix instruction with a card, and records golden bytes:

    OUT=. PYTHONPATH=. python tests/gpu/check_hopper.py [section ...]

Writes $OUT/hopper.json and $OUT/hopper_golden.json and exits 1 if a check failed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from report import Report, environment, main

from rlk.evidence.bytes import compare, describe
from rlk.kernels._triton.launch import OPTIONS
from rlk.kernels.det_gemm import det_gemm, det_gemm_input_part, det_gemm_weight_grad, hopper
from rlk.kernels.det_gemm import triton as gemm
from rlk.kernels.det_gemm.hopper_probes import FAMILIES, GOLDEN, Golden, accumulators, digest, edges, golden_leaves, operands
from rlk.kernels.det_gemm.triton_tiles import Tile
from rlk.kernels.dispatch import readback

BLOCKS = 128
INSTRUCTIONS = {"mma.sync": 16, "wgmma.mma_async": 64}
"""Instruction → rows of the tile that makes the compiler choose it."""
TILES = {
    "mma.sync": Tile(16, 32, 256, 4, 4),
    "wgmma": Tile(64, 64, 64, 4, 3),
    "wgmma through descriptors": Tile(128, 128, 64, 8, 3, True, 8),
}
DEPTHS = (16, 48, 72, 200, 512, 4096, 12288)


@triton.jit
def _steps(a, b, c, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = c + a·bᵀ over 16 products: one instruction per output, one block of [ROWS, COLUMNS] per program."""
    row, column, k = tl.arange(0, ROWS), tl.arange(0, COLUMNS), tl.arange(0, 16)
    block = tl.program_id(0)
    x = tl.load(a + (block * ROWS + row)[:, None] * 16 + k[None, :])
    y = tl.load(b + (block * COLUMNS + column)[None, :] * 16 + k[:, None])
    at = (block * ROWS + row)[:, None] * COLUMNS + column[None, :]
    tl.store(out + at, tl.dot(x, y, tl.load(c + at)))


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.cpu().contiguous().view({2: torch.int16, 4: torch.int32}[values.element_size()])


def _check(report: Report, name: str, case: str, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Every bit equal, those of NaN and infinities too."""
    outcome = compare(case, _bits(found), _bits(expected))
    report.holds(name, outcome.equal, **({} if outcome.equal else {"case": case, "why": describe(outcome)}))
    return outcome.equal


def steps(report: Report, instruction: str) -> None:
    """Single instructions, over half a million of each family, with every kind of accumulator."""
    rows, columns = INSTRUCTIONS[instruction], 64
    blocks = BLOCKS * 64 // rows
    payloads: set[str] = set()
    differing: dict[str, list[dict[str, object]]] = {}
    for family in FAMILIES:
        a, b = operands(family, 2, blocks * rows, blocks * columns, 16)
        c = accumulators(family, 2, blocks, rows, columns)
        out = torch.empty(blocks, rows, columns, device="cuda")
        kernel = _steps[(blocks,)](a.cuda(), b.cuda(), c.cuda(), out, ROWS=rows, COLUMNS=columns, num_warps=4, **OPTIONS["cuda"])
        found = out.cpu()
        left = a.view(blocks, rows, 1, 16).expand(-1, -1, columns, -1).reshape(-1, 16)
        right = b.view(blocks, 1, columns, 16).expand(-1, rows, -1, -1).reshape(-1, 16)
        expected = hopper.step(left, right, c.flatten())
        ptx = kernel.asm["ptx"]
        report.holds(f"{instruction} is the instruction", instruction in ptx)
        payloads |= set(_hex(found[found.isnan()], 32))
        found = torch.where(found.isnan(), torch.nan, found).flatten()
        if not _check(report, f"one step of {instruction}", family.name, found, expected):
            wrong = (_bits(found) != _bits(expected)).nonzero().flatten()
            differing[family.name] = [
                {
                    "a": _hex(left[i], 16),
                    "b": _hex(right[i], 16),
                    "c": _hex(c.flatten()[i : i + 1], 32),
                    "card": _hex(found[i : i + 1], 32),
                    "oracle": _hex(expected[i : i + 1], 32),
                }
                for i in wrong[:: max(1, len(wrong) // 100)][:100].tolist()
            ]
            print(family.name, len(wrong), "of", len(found), "differ", flush=True)
    a, b = edges()
    out = torch.empty(rows, columns, device="cuda")
    _steps[(1,)](a.cuda(), b.cuda(), torch.zeros_like(out), out, ROWS=rows, COLUMNS=columns, num_warps=4, **OPTIONS["cuda"])
    zeros = torch.zeros(rows * columns)
    expected = hopper.step(a[:rows].repeat_interleave(columns, 0), b.repeat(rows, 1), zeros)
    _check(report, f"one step of {instruction}", "the last places", out.flatten(), expected)
    report.holds(f"NaN of {instruction}", True, payloads=sorted(payloads))
    if differing:
        (Path(os.environ.get("OUT", ".")) / f"differing_{instruction}.json").write_text(json.dumps(differing))


def _hex(values: torch.Tensor, width: int) -> list[str]:
    return [f"{bits % (1 << width):0{width // 4}x}" for bits in _bits(values).tolist()]


def products(report: Report, tile: str) -> None:
    """Whole chains by one tile, in plain and in split order."""
    for family in FAMILIES:
        for depth in DEPTHS:
            if family.special and depth > 512:
                continue  # nothing but NaN
            x, w = operands(family, 3, 128, 160, depth)
            for splits in (1, 8) if depth % 128 == 0 else (1,):
                out = torch.full((128, 160), 5.0, device="cuda")
                gemm.contract("det_gemm", x.cuda(), w.cuda(), False, splits, out, TILES[tile], True)
                _check(
                    report, f"chains of {tile}", f"{family.name} K{depth} leaves {splits}", out, hopper.det_gemm(x, w, splits, out.dtype)
                )


def public(report: Report) -> None:
    """What the operator gives at the shapes of a model, a sample of rows and columns, by both backends; gradients too."""
    torch.manual_seed(0)
    normal = lambda *size: torch.randn(*size, device="cuda")
    draws = {"normal": lambda *size: normal(*size).bfloat16(), "wide": lambda *size: (normal(*size) * (4 * normal(*size)).exp()).bfloat16()}
    for name, draw in draws.items():
        for rows, columns, depth in ((1, 4096, 12288), (16, 4096, 4096), (96, 6144, 4096), (300, 4096, 12288), (2048, 4096, 4096)):
            x, w = draw(rows, depth), draw(columns, depth)
            some = slice(0, None, max(1, rows // 128)), slice(3, None, columns // 512)
            for splits in (1, 8):
                expected = hopper.det_gemm(x[some[0]].cpu(), w[some[1]].cpu(), splits)
                for backend in ("triton", "vendor"):
                    found = det_gemm(x, w, splits=splits, backend=backend)[some[0], some[1]]
                    _check(report, f"det_gemm {backend}", f"{name} {rows}x{columns}x{depth} leaves {splits}", found, expected)
        dy, w = draw(128, 1024), draw(1024, 512)
        expected = hopper.det_gemm(dy.cpu(), w.T.cpu(), 8, torch.float32)
        _check(report, "input gradient", name, det_gemm_input_part(dy, w, splits=8), expected)


def _recorded(case: Golden) -> torch.Tensor:
    x, other = case.operands()
    if case.splits:
        return det_gemm(x.cuda(), other.cuda(), splits=case.splits, out_dtype=torch.float32 if case.fp32 else torch.bfloat16)
    leaves = golden_leaves()
    index, offsets = torch.tensor(leaves.index, device="cuda"), torch.tensor(leaves.offsets, device="cuda")
    return det_gemm_weight_grad(x.cuda(), other.cuda(), index, offsets)


def golden(report: Report) -> None:
    """Writes hopper_golden.json: each case's digest and its first row."""
    cases = {}
    for case in GOLDEN:
        found = _recorded(case).cpu()
        _check(report, "golden", case.name, found, case.oracle())
        cases[case.name] = {"sha256": digest(found), "first_row": _hex(found[0], 8 * found.element_size())}
    facts = {**environment(), "kernels": sorted({ran.kernel_id for ran in readback() if ran.backend == "triton"}), "cases": cases}
    (Path(os.environ.get("OUT", ".")) / "hopper_golden.json").write_text(json.dumps(facts, indent=1) + "\n")


SECTIONS: dict[str, Callable[[Report], None]] = {
    **{f"steps {name}": partial(steps, instruction=name) for name in INSTRUCTIONS},
    **{f"products {name}": partial(products, tile=name) for name in TILES},
    "public": public,
    "golden": golden,
}

if __name__ == "__main__":
    main("hopper", SECTIONS)
