"""The kept results of the engines on a card: cells that add up and are real ones, and a benchmark that shows no time without its proof."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlk.acceptance.matrix import SNAPSHOT_WORKLOAD, enumerate_cells
from rlk.acceptance.validate import KERNEL_ID

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SCOPES = ("chain", "integration", "ablation", "control")
REQUIRED = {cell.cell_id: cell for cell in enumerate_cells("cuda") if cell.required and cell.scope in SCOPES}


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def test_every_engine_cell_is_green_red_or_missing_once() -> None:
    summary = read("engines_h200.json")
    named = [*summary["green"], *summary["red"], *summary["missing"]]
    assert len(named) == len(set(named)) == summary["required"]
    assert set(named) == set(REQUIRED)
    assert {cell_id for cell_id in REQUIRED if SNAPSHOT_WORKLOAD in cell_id} <= set(summary["missing"])
    assert summary["elements_compared"] > 0
    assert summary["dirty"] is False
    assert re.fullmatch(r"[0-9a-f]{40}", summary["commit"])
    assert "H200" in summary["card"]


def test_green_engine_cells_ran_the_operators_that_they_ask_for() -> None:
    summary = read("engines_h200.json")
    assert all(KERNEL_ID.fullmatch(kernel_id) for kernel_id in summary["kernels"])
    ran = {op for operators in summary["kernels"].values() for op in operators}
    for cell_id in summary["green"]:
        assert {op for _, op in REQUIRED[cell_id].strict} <= ran, cell_id


def test_speed_is_shown_only_beside_equal_bytes() -> None:
    result = read("e2e_h200.json")
    assert result["proof"]["differ"] == 0 < result["proof"]["tokens"]
    assert result["where"]["dirty"] is False
    assert "H200" in result["where"]["gpus"][0]["name"]
    for speeds in result["rows"].values():
        assert all(value > 0 for values in speeds.values() for value in values)
        assert {"vllm", "rlk strict"} <= set(speeds)


def test_a_training_step_is_timed_beside_equal_gradients() -> None:
    result = read("training_h200.json")
    assert result["differ"] == 0
    assert result["where"]["dirty"] is False
    assert {len(steps) for steps in result["times_ms"].values()} == {5}
    assert set(result["times_ms"]) == set(result["peak_allocated"]) == set(result["profile"])


def test_parts_of_a_step_are_timed_beside_equal_bytes() -> None:
    result = read("engine_steps_h200.json")
    parts = [part for part in result.values() if isinstance(part, dict) and "differ" in part]
    assert len(parts) == 5
    for part in parts:
        assert set(part["differ"].values()) == {0}
        assert {"tree", "committed", "what"} <= set(part)
    assert result["check_vllm"]["failed"] == []
    assert len(result["check_vllm"]["checks"]) == 20


@pytest.mark.parametrize("name", ["engines_h200.json", "e2e_h200.json", "training_h200.json", "engine_steps_h200.json"])
def test_results_name_no_place_of_the_machine(name: str) -> None:
    text = (RESULTS / name).read_text()
    assert not re.search(r'"/(tmp|root|home|dev|work)\b', text)
