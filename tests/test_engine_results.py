"""The kept times of the engines on a card: a benchmark shows none without its proof."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def test_speed_is_shown_only_beside_equal_bytes() -> None:
    result = read("e2e_h200.json")
    assert result["proof"]["differ"] == 0 < result["proof"]["tokens"]
    assert result["where"]["dirty"] is False
    assert "H200" in result["where"]["gpus"][0]["name"]
    for speeds in result["rows"].values():
        assert all(value > 0 for values in speeds.values() for value in values)
        assert {"vllm", "rlk strict"} <= set(speeds)


def test_a_training_step_is_timed_beside_equal_gradients() -> None:
    for name, row in read("training_h200.json")["rows"].items():
        assert name == f"{row['work']['scored']} of {row['work']['tokens']} tokens scored"
        assert row["differ"] == 0
        assert row["where"]["dirty"] is False
        assert {len(steps) for steps in row["times_ms"].values()} == {5}
        assert set(row["times_ms"]) == set(row["peak_allocated"]) == set(row["busy_ms"]) == set(row["profile"])


def test_a_whole_update_is_timed_where_no_token_differs() -> None:
    result = read("step_h200.json")
    assert (result["red"], result["where"]["dirty"]) == ("", False)
    (run,) = result["arms"]["strict"]
    assert run["tokens that differ"] == [0, 0, 0]
    for update in run["updates"]:
        assert update["tokens"] == result["work"]["prompts"] * result["work"]["responses"] * result["work"]["response_tokens"]
        phases = ("generate", "score", "compare", "reference", "update", "publish", "load")
        assert sum(update["seconds"][phase] for phase in phases) <= update["seconds"]["step"]


def test_parts_of_a_step_are_timed_beside_equal_bytes() -> None:
    result = read("engine_steps_h200.json")
    parts = [part for part in result.values() if isinstance(part, dict) and "differ" in part]
    assert len(parts) == 5
    for part in parts:
        assert set(part["differ"].values()) == {0}
        assert {"tree", "committed", "what"} <= set(part)
    assert result["check_vllm"]["failed"] == []
    assert len(result["check_vllm"]["checks"]) == 20


@pytest.mark.parametrize("name", ["engines_h200.json", "e2e_h200.json", "training_h200.json", "engine_steps_h200.json", "step_h200.json"])
def test_results_name_no_place_of_the_machine(name: str) -> None:
    text = (RESULTS / name).read_text()
    assert not re.search(r'"/(tmp|root|home|dev|work)\b', text)
