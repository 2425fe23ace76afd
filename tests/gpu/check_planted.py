"""Plants operators into a card's backends whose bytes follow the batch, and lets their own cells judge them:

    OUT=. PYTHONPATH=. python tests/gpu/check_planted.py [section ...]

Each cell is green without the fault and red with it, by its comparisons. Writes $OUT/planted.json and exits 1 if that is not so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as in an acceptance session

import torch
from planting import planted_module
from report import Report, main

import rlk.kernels.attention as attention_module
import rlk.kernels.det_gemm as det_gemm_module
from rlk.acceptance.collector import Evidence
from rlk.acceptance.judge import judge_cell
from rlk.acceptance.measure import measure
from rlk.acceptance.ws1 import ws1_cells
from rlk.contract.judgments import JUDGMENTS
from rlk.contract.operators import Tier
from rlk.evidence.schema import CellRecord, Status
from rlk.kernels.registry import declared_kernels
from rlk.kernels.rms_norm import triton as rms_norm_triton


def judged(operator: str, judgment: str, tier: Tier = "primary") -> CellRecord:
    """The record of one Triton cell as an acceptance session would keep it."""
    wanted = (operator, f"{tier}-triton", judgment)
    cell = next(c for c in ws1_cells("cuda") if (c.subject, c.workload, c.judgment) == wanted)
    evidence, trouble = Evidence(), []
    try:
        measure(operator, tier, next(j for j in JUDGMENTS if j.name == judgment), cell.backend, evidence)
    except Exception as error:  # as in a session, where it fails the cell
        trouble.append(repr(error))
    return judge_cell(cell, evidence.close(), trouble, declared_kernels())


def expect(report: Report, what: str, record: CellRecord, *, caught: bool) -> None:
    """A fault is caught by bytes that differ, not by an error of the plant; without one the cell is green."""
    differing = [c for c in record.comparisons if c.mismatched_elements]
    right = record.status is Status.FAIL and bool(differing) if caught else record.status is Status.PASS
    facts = {"cell": record.cell_id, "status": record.status, "differing": len(differing), "of": len(record.comparisons)}
    first = differing[0] if differing else None
    if first is not None:
        facts |= {"first": first.name, "elements": f"{first.mismatched_elements} of {first.elements}"}
    report.holds(what, right, **facts, reasons=list(record.reasons[:2]))


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """``holder.name``, or ``holder[name]``, is ``value`` for a while."""
    table = isinstance(holder, dict)
    honest = holder[name] if table else getattr(holder, name)
    put = holder.__setitem__ if table else lambda key, new: setattr(holder, key, new)
    put(name, value)
    try:
        yield
    finally:
        put(name, honest)


def split_k(report: Report) -> None:
    """The default library, which splits K where there are few rows, for det_gemm."""
    expect(report, "det_gemm as it is", judged("det_gemm", "forward_invariance"), caught=False)
    table = cast(dict[str, Callable[..., torch.Tensor]], det_gemm_module._FORWARD)
    honest = table["triton"]

    def faulty(x: torch.Tensor, w: torch.Tensor, splits: int, *rest: Any) -> torch.Tensor:
        honest(x, w, splits, *rest)
        return torch.mm(x, w.T)

    with replaced(table, "triton", faulty):
        expect(report, "planted: default cuBLAS", judged("det_gemm", "forward_invariance"), caught=True)


_SHAPE = "    shape = _shape(x.shape[-1]){}\n    SOURCE"
_LAYOUT = (_SHAPE.format(""), _SHAPE.format(" | {'warps': 8 if rows > 1024 else 1}"))
_ROW_SUM = ("row_tree(x * x)", "tl.sum(x * x, 1)")
_REGISTERED = (
    ('@cpu.rms_norm.register_kernel("cuda")\n', ""),
    ('@cpu.rms_norm_backward.register_kernel("cuda")\n', ""),
)


def row_sum(report: Report) -> None:
    """tl.sum for the row tree of rms_norm, in a kernel that takes more warps for more rows. The warps alone change nothing."""
    for what, faults, caught in (("warps by the number of rows", (), False), ("planted: tl.sum of a row", (_ROW_SUM,), True)):
        copy = planted_module(rms_norm_triton, _LAYOUT, *faults, *_REGISTERED)
        with replaced(rms_norm_triton, "normalise", copy.normalise):
            expect(report, what, judged("rms_norm", "forward_invariance"), caught=caught)


def automatic_splits(report: Report) -> None:
    """Splits of the keys by the size of the batch, in paged attention."""
    expect(report, "attention as it is", judged("attention", "forward_invariance"), caught=False)
    table = cast(dict[str, Callable[..., torch.Tensor]], attention_module._PAGED)
    honest = table["triton"]

    def faulty(q: torch.Tensor, *rest: Any) -> torch.Tensor:
        *others, kv_tile, kv_split = rest
        return honest(q, *others, kv_tile, 4 * kv_tile if len(q) < 64 else kv_split)

    with replaced(table, "triton", faulty):
        expect(report, "planted: automatic splits", judged("attention", "forward_invariance"), caught=True)


SECTIONS: dict[str, Callable[[Report], None]] = {
    "split-K": split_k,
    "row sum": row_sum,
    "automatic splits": automatic_splits,
}

if __name__ == "__main__":
    main("planted", SECTIONS)
