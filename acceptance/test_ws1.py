"""Operators: four judgments of each, at short and at model dimensions, in every layout, on every kernel backend."""

from __future__ import annotations

from typing import cast

import pytest

from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence
from rlk.acceptance.measure import measure
from rlk.contract.judgments import JUDGMENTS
from rlk.contract.operators import Tier
from rlk.kernels.attention.vendor_library import LIBRARY


def _measure(cell: Cell, evidence: Evidence) -> None:
    tier = cast(Tier, cell.workload.partition("-")[0])
    judgment = next(j for j in JUDGMENTS if j.name == cell.judgment)
    measure(cell.subject, tier, judgment, cell.backend, evidence)


@pytest.mark.cells(scope="ws1", backend="cpu")
def test_cpu_kernels(cell: Cell, evidence: Evidence) -> None:
    _measure(cell, evidence)


@pytest.mark.cells(scope="ws1", backend="triton")
def test_triton_kernels(cell: Cell, evidence: Evidence) -> None:
    _measure(cell, evidence)


@pytest.mark.cells(scope="ws1", backend="vendor", subject="det_gemm")
def test_vendor_products(cell: Cell, evidence: Evidence) -> None:
    _measure(cell, evidence)


@pytest.mark.cells(scope="ws1", backend="vendor", subject="lm_head")
def test_vendor_logits(cell: Cell, evidence: Evidence) -> None:
    _measure(cell, evidence)


if LIBRARY.available:  # without vLLM's library nothing judges these cells, and they are MISSING

    @pytest.mark.cells(scope="ws1", backend="vendor", subject="attention")
    def test_vendor_attention(cell: Cell, evidence: Evidence) -> None:
        _measure(cell, evidence)
