"""The engine scopes of the matrix: which models a platform runs, and what is missing or unsupported there, by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from acceptance import engines
from rlk.acceptance.cell import Platform
from rlk.acceptance.matrix import CHAIN_MODEL, CROSS, CROSS_TRANSPORTS, SNAPSHOT_WORKLOAD, enumerate_cells, gradient_names, several_cards
from rlk.contract.models import QWEN3_8B, QWEN3_8B_UPDATED, TINY
from rlk.contract.sampling import SamplingParams
from rlk.loop.cluster import Cluster
from rlk.loop.labels import shape_config
from rlk.loop.plan import PlanError, RunPlan
from rlk.model.layout import hf_shapes

ENGINE_SCOPES = ("chain", "integration", "ablation", "control")


def test_gradients_are_named_as_in_a_checkpoint() -> None:
    for shape in (TINY, QWEN3_8B):
        assert gradient_names(shape) == tuple(hf_shapes(shape_config(shape)))
    assert len(gradient_names(QWEN3_8B)) == 399


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_card_scores_the_full_depth_and_updates_a_part_of_it(platform: Platform) -> None:
    cells = [cell for cell in enumerate_cells(platform) if cell.scope in ENGINE_SCOPES]
    assert all("synthetic" in cell.workload or cell.workload == SNAPSHOT_WORKLOAD for cell in cells)
    assert {cell.workload.startswith(QWEN3_8B_UPDATED.name) for cell in cells if cell.scope != "chain"} == {True}
    named = {cell.cell_id.removeprefix(f"{platform}/chain/"): cell.names for cell in cells if cell.scope == "chain"}
    assert len(named["train_vs_rollout/qwen3-8b-synthetic/gate_up"]) == CHAIN_MODEL[platform].layers == 36
    assert len(named["train_layouts/qwen3-8b-synthetic/permuted"]) == 36 * 15 + 4
    assert len(named["train_layouts/qwen3-8b-synthetic/gradients"]) == 399


def test_a_card_requires_engines_of_several_ranks_too() -> None:
    cells = [cell for cell in enumerate_cells("cuda") if cell.scope in ENGINE_SCOPES]
    judged = Counter((cell.subject, cell.judgment) for cell in cells if cell.subject in CROSS_TRANSPORTS)
    assert judged == Counter((subject, judgment) for subject in (CROSS, f"{CROSS}_nccl") for judgment in ("logprob", "publication"))
    assert all(several_cards(cell) == (cell.subject in CROSS_TRANSPORTS) for cell in cells)
    assert all(cell.required for cell in cells)


def test_what_amd_cards_cannot_show_is_unsupported_by_name() -> None:
    cells = [cell for cell in enumerate_cells("rocm") if cell.scope in ENGINE_SCOPES and not cell.required]
    assert Counter(cell.unsupported for cell in cells) == {"the ranks of a rollout engine have no transport between AMD cards": 4}


def test_the_cpu_matrix_has_no_more_than_it_had() -> None:
    cells = [cell for cell in enumerate_cells("cpu") if cell.scope in ENGINE_SCOPES]
    assert Counter(cell.scope for cell in cells if cell.required) == {"chain": 38, "integration": 10, "ablation": 12, "control": 4}
    assert {cell.workload.partition("-")[0] for cell in cells} == {"tiny"}
    assert {cell.subject for cell in cells if cell.scope == "integration"} == {"RR", CROSS}


class _Opened:
    """A cluster that notes which engines it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def rollout(self, *place: Any) -> Any:
        self.asked.append(place)
        return SimpleNamespace(start=lambda *_: None)

    train = rollout

    def stop(self) -> None:
        self.asked.append(())


def _plan(runs: engines.Runs, name: str, sampling: SamplingParams, **profile: Any) -> RunPlan:
    """What a run needs to be started, which, as any plan, is refused where the run has been."""
    if (runs.root / name).exists():
        raise PlanError(name)
    ranks = {axis: profile.get(axis, 1) for axis in ("tp", "cp", "rollout_tp")}
    parts = {"checkpoint": SimpleNamespace(path=runs.root), "context": 9, "micro_batch_size": 1, "grpo": None, "adam": None}
    return RunPlan.model_construct(
        directory=runs.root / name, topology=SimpleNamespace(**ranks), transport=profile.get("transport"), **parts
    )


@pytest.mark.parametrize(("subject", "transport"), CROSS_TRANSPORTS.items())
def test_cells_of_several_ranks_run_over_the_transport_of_their_subject(
    subject: str, transport: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[RunPlan] = []
    monkeypatch.setattr(engines.Runs, "plan", _plan)
    monkeypatch.setattr(engines, "run_loop", lambda plan, *_, **__: ran.append(plan))
    cluster, cell = _Opened(), next(cell for cell in enumerate_cells("cuda") if cell.subject == subject)
    runs = engines.Runs(cast(Cluster, cluster), "cuda", tmp_path, tmp_path)
    for asked in (cell, cell, replace(cell, subject="RR")):
        runs.integration(asked)
    one, several = [("strict", 1, None), ("strict", 1, 1, None)], [("strict", 2, transport), ("strict", 1, 2, transport)]
    assert cluster.asked == [(), *one, *several]
    assert [(run.topology.rollout_tp, run.transport) for run in ran] == [(2, transport), (1, None)]


def test_the_second_transport_opens_no_engine_for_a_run_that_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines.Runs, "plan", _plan)
    monkeypatch.setattr(engines, "run_loop", lambda plan, *_, **__: plan.directory.mkdir())
    cluster = _Opened()
    runs = engines.Runs(cast(Cluster, cluster), "cuda", tmp_path, tmp_path)
    for subject in CROSS_TRANSPORTS:
        cell = next(cell for cell in enumerate_cells("cuda") if cell.subject == subject)
        for asked in (cell, replace(cell, subject="RR")):
            runs.integration(asked)
    one, several = [("strict", 1, None), ("strict", 1, 1, None)], [("strict", 2, None), ("strict", 1, 2, None)]
    assert cluster.asked == [(), *one, *several, (), ("strict", 2, "nccl"), ("strict", 1, 2, "nccl")]


def test_on_a_card_no_run_leaves_its_weights_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_weights(plan: Any, *_: Any, **__: Any) -> None:
        (plan.directory / "weights").mkdir(parents=True)

    monkeypatch.setattr(engines, "run_loop", leave_weights)
    runs = engines.Runs(cast(Cluster, None), "cuda", tmp_path, tmp_path)
    plans = [SimpleNamespace(directory=tmp_path / str(tp), topology=SimpleNamespace(rollout_tp=tp)) for tp in (1, 2)]
    for plan in plans:
        runs.run(cast(RunPlan, plan), cast(Cluster, object()))
    assert [(plan.directory / "weights").exists() for plan in plans] == [False, True]
    runs.drop_weights()
    assert [(plan.directory / "weights").exists() for plan in plans] == [False, False]
