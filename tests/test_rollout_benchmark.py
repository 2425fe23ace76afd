"""The benchmark of rollouts: engines of one topology at a time, in an equal share of the time, and no time where strict bytes differ."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

E2E = Path(__file__).resolve().parents[1] / "benchmarks" / "e2e"


class FakeArm:
    """An engine that is up at once, unless its name is in ``lost``, and answers at once."""

    alive: ClassVar[list[str]] = []
    seen: ClassVar[list[tuple[str, ...]]] = []
    waited: ClassVar[dict[str, float]] = {}
    digests: ClassVar[dict[str, str]] = {}
    lost: ClassVar[set[str]] = set()

    def __init__(self, name: str, kind: Any, checkpoint: Path) -> None:
        self.name, self.strict = name, kind.mode == "strict"
        self.alive.append(name)
        self.seen.append(tuple(self.alive))

    def ready(self, seconds: float) -> dict[str, Any]:
        self.waited[self.name] = seconds
        if self.name in self.lost:
            raise RuntimeError(f"arm {self.name} was not up in time")
        return {"start_s": 1.0}

    def ask(self, do: str, **order: Any) -> Any:
        said = {
            "proved": {"tokens": 4, "differ": 0, "digest": self.digests.get(self.name, "same")},
            "timed": {"seconds": 1.0, "tokens": 10},
            "memory": [{"peak_reserved": 1 << 30}],
            "profiled": {"prefill_ms": 1.0, "step_ms": 1.0},
            "published": 0.5,
        }
        return said[do]

    def close(self) -> None:
        if self.name in self.alive:
            self.alive.remove(self.name)


@pytest.fixture
def rollout(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(E2E))
    import rollout

    monkeypatch.setattr(rollout, "Arm", FakeArm)
    for held in (FakeArm.alive, FakeArm.seen, FakeArm.waited, FakeArm.digests, FakeArm.lost):
        held.clear()
    yield rollout
    sys.modules.pop("rollout", None)


def measured(rollout: Any) -> dict[str, Any]:
    arms = {name: kind for ranks in (1, 2) for name, kind in rollout.kinds(ranks).items()}
    return rollout.measure(Path("model"), arms, rollout.RANKS_ROWS, 1000.0, lambda result: None)


def test_engines_of_one_topology_run_together_and_those_of_the_next_after_them(rollout: Any) -> None:
    result = measured(rollout)
    assert [len(alive) for alive in FakeArm.seen] == [1, 2, 3, 1, 2, 3]
    assert all("TP 2" in name for name in FakeArm.seen[-1])
    assert FakeArm.alive == []
    assert 300 < FakeArm.waited["vllm"] < 380 < 700 < FakeArm.waited["vllm, TP 2"] < 755
    assert not result["skipped"] + result["failed"]
    assert result["proof"]["tokens"] == 12
    lines = rollout.table(result).splitlines()
    assert lines[2].endswith("| 1.00, 1.00, 1.00 |")
    assert lines[0].split(" | ")[1:4] == ["vllm", "vllm batch-invariant", "rlk strict"]


def test_other_bytes_at_another_topology_leave_no_time(rollout: Any) -> None:
    FakeArm.digests["rlk strict, TP 2"] = "other"
    result = measured(rollout)
    assert result["proof"]["differ"] == 4
    assert result["rows"] == result["profile"] == {}


def test_an_engine_that_is_not_up_in_time_leaves_the_others_times(rollout: Any) -> None:
    FakeArm.lost.add("vllm, TP 2")
    result = measured(rollout)
    assert result["failed"] == ["arm vllm, TP 2 was not up in time"]
    assert all("rlk strict, TP 2" in speeds and "vllm, TP 2" not in speeds for speeds in result["rows"].values())
