"""The benchmark of whole RL steps: no time of strict runs that differ, ratios of medians, and rounds that end in time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlk.loop.controller import RunFailed

E2E = Path(__file__).resolve().parents[1] / "benchmarks" / "e2e"


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(E2E))
    import step

    yield step
    for name in ("step", "where"):
        sys.modules.pop(name, None)


def answers(found: Sequence[tuple[str, ...] | RunFailed], took: float = 1.0) -> Callable[..., Any]:
    """A run that answers with these hashes, one after the other, or fails."""
    left = iter(found)

    def run(plan: Any, work: Any, patience: float) -> Any:
        hashes = next(left)
        if isinstance(hashes, RunFailed):
            raise hashes
        updates = [{"seconds": {"step": took * (1 + plan), "score": 0.5}, "tokens": 8}]
        return SimpleNamespace(model_hashes=hashes), {"start_s": 1.0, "updates": updates, "tokens that differ": [0]}

    return run


def measured(step: Any, names: Sequence[str], limit: float = 100.0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    kept: list[dict[str, Any]] = []
    return step.measure({name: (lambda number, at=at: at) for at, name in enumerate(names)}, step.Work(), limit, kept.append), kept


def test_arms_are_strict_against_native_on_one_rank_and_strict_against_one_rank_on_several(step: Any) -> None:
    assert list(step.arms(1, 1, 1)) == ["strict", "native"]
    several = step.arms(2, 1, 2)
    assert [options["mode"] for options in several.values()] == ["consistency", "consistency"]
    assert [options.get("tp", 1) for options in several.values()] == [2, 1]


def test_runs_take_turns_and_the_table_has_their_ratio(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "run", answers([("a",), ("b",)] * step.ROUNDS))
    result, kept = measured(step, ["strict", "native"])
    assert [len(runs) for runs in result["arms"].values()] == [step.ROUNDS] * 2
    assert len(kept) == 2 * step.ROUNDS
    assert not result["red"]
    assert not result["failed"]
    lines = step.table(result).splitlines()
    assert lines[2] == "| step | 1.000 (1.000–1.000) | 2.000 (2.000–2.000) | 0.50 |"


def test_strict_runs_that_leave_other_weights_or_fail_are_red(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "run", answers([("a",), ("b",)]))
    result, _ = measured(step, list(step.arms(2, 1, 2)))
    assert result["red"] == "strict runs leave 2 different weights"
    monkeypatch.setattr(step, "run", answers([RunFailed("update 1: 1 of 8 elements differ", Path("x"))]))
    result, _ = measured(step, ["strict", "native"])
    assert "1 of 8 elements differ" in result["red"]


def test_a_native_run_that_fails_leaves_the_strict_times(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "run", answers([("a",), RunFailed("no memory", Path("x"))]))
    result, _ = measured(step, ["strict", "native"])
    assert not result["red"]
    assert result["failed"].startswith("native: no memory")
    assert step.table(result).splitlines()[2].startswith("| step | 1.000 (1.000–1.000) |  |")


def test_no_round_is_begun_that_would_not_end_in_time(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "run", answers([("a",), ("b",)]))
    result, _ = measured(step, ["strict", "native"], limit=0.0)
    assert [len(runs) for runs in result["arms"].values()] == [1, 1]


def test_prompts_have_the_asked_tokens_and_differ(step: Any) -> None:
    work = step.Work(prompts=3, prompt_tokens=256)
    prompts = [task.prompt for number in (1, 2) for task in work.tasks(number)]
    assert len(set(prompts)) == 6
    assert {len(prompt) for prompt in prompts} <= {255, 256}
