"""The plot of the operators' times draws every recorded result."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def plot() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "operators" / "plot.py"))


def test_every_kind_of_operator_has_ratios(plot: dict[str, Any]) -> None:
    rows = {row.name: row for row in plot["operators"]()}
    for name in (
        "qkv, forward",
        "down_proj, weight gradient",
        "attention, prefill",
        "rms_norm",
        "rope",
        "swiglu",
        "logp",
        "top-p draw and logp",
    ):
        assert rows[name].ratios, name
    for row in rows.values():
        assert row.sizes == sorted(row.sizes), row.name
        assert all(0 < ratio < 20 for ratio in row.ratios), row.name
        assert 1 <= row.target < 2, row.name


def test_targets_are_those_of_the_orders(plot: dict[str, Any]) -> None:
    target = {row.name: row.target for row in plot["operators"]()}
    assert target["qkv, forward"] == target["o_proj, input gradient"] == 1.03
    assert target["o_proj, forward"] == target["qkv, input gradient"] == target["qkv, weight gradient"] == 1.1


def test_it_is_drawn(plot: dict[str, Any], tmp_path: Path) -> None:
    rows = plot["operators"]()
    plot["draw"](rows).savefig(tmp_path / "operators.svg")
    assert len((tmp_path / "operators.svg").read_bytes()) > 10_000
    drawn = (ROOT / "benchmarks" / "results" / "operators.svg").read_text()
    assert [row.name for row in rows if f"{row.name} (" not in drawn] == []
