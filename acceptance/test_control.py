"""Negative controls: faults planted into this very session's evidence and engines, which the judge or the loop must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from acceptance.engines import Runs
from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence
from rlk.acceptance.judge import Findings, judge_cell
from rlk.acceptance.matrix import WORKLOAD, enumerate_cells
from rlk.contract.arms import Mode
from rlk.contract.sampling import SamplingParams
from rlk.contract.workloads import SAMPLING_ROWS
from rlk.evidence.bytes import compare
from rlk.evidence.schema import Status
from rlk.kernels.registry import declared_kernels
from rlk.loop.actors import Identity
from rlk.loop.cluster import Cluster, Remote
from rlk.loop.controller import RunFailed
from rlk.loop.records import RunSummary, logprobs_file
from rlk.parallel.transport import Transport


def _flip_lowest_bit(logprobs: torch.Tensor) -> None:
    logprobs.view(torch.int32)[len(logprobs) // 2] ^= 1


def _negate_zero(logprobs: torch.Tensor) -> None:
    logprobs[0] = -0.0


def _offset(logprobs: torch.Tensor) -> None:
    logprobs += 1e-6


PLANTED: dict[str, Callable[[torch.Tensor], None]] = {
    "flipped_bit": _flip_lowest_bit,
    "negative_zero": _negate_zero,
    "offset_logprob": _offset,
}


def _judged(cell: Cell, summary: RunSummary, plant: Callable[[torch.Tensor], None] | None) -> tuple[Status, str]:
    """How the judge ends an integration cell that hands in all that the run left, with a fault in the first update's rollout logprobs."""
    comparisons = []
    for step in summary.steps:
        rows = load_file(summary.directory / logprobs_file(step.step))
        train, rollout = rows["train"], rows["rollout"]
        # A zero on both sides, so that where the fault is a sign, it is the only difference.
        train[0] = rollout[0] = 0.0
        if plant is not None and step.step == 1:
            plant(rollout)
        comparisons.append(compare(f"update {step.step}: logprob", train, rollout))
    findings = Findings(comparisons=comparisons, kernels=list(summary.manifest.kernels), facts=dict.fromkeys(cell.facts, "present"))
    record = judge_cell(cell, findings, [], declared_kernels())
    return record.status, "; ".join(record.reasons) or "no reason"


def _plant(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    row = f"{WORKLOAD[cell.platform]}-{SAMPLING_ROWS[0].name}"
    judged = next(c for c in enumerate_cells(cell.platform) if (c.scope, c.workload, c.judgment) == ("integration", row, "logprob"))
    summary = runs.integration(judged)
    status, why = _judged(judged, summary, None)
    evidence.control("the same evidence without the fault passes", status is Status.PASS, why)
    status, why = _judged(judged, summary, PLANTED[cell.subject])
    evidence.control(cell.subject, status is Status.FAIL, why)


@pytest.mark.cells(scope="control", subject="flipped_bit")
def test_flipped_bit(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    _plant(cell, evidence, runs)


@pytest.mark.cells(scope="control", subject="negative_zero")
def test_negative_zero(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    _plant(cell, evidence, runs)


@pytest.mark.cells(scope="control", subject="offset_logprob")
def test_offset_logprob(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    _plant(cell, evidence, runs)


@dataclass(frozen=True)
class _Said:
    """An answer that was waited for."""

    answer: Identity

    def result(self) -> Identity:
        return self.answer


class _KeepsOldWeights(Remote):
    """A rollout engine that serves its start weights whatever is published; with ``lies`` it claims otherwise and takes the version."""

    lies = False
    start_weights: Path

    def start(self, method: str, *arguments: Any) -> Any:
        return _Said(self._kept(*arguments)) if method == "load" else super().start(method, *arguments)

    def _kept(self, _: Path, version: int, announced: str) -> Identity:
        found = self.call("readback")
        if not self.lies:
            return found["weight_version"], found["model_hash"]
        super().start("load", self.start_weights, version, found["model_hash"]).result()
        return version, announced


class _StaleCluster(Cluster):
    """The session's cluster, with a rollout engine that keeps old weights."""

    def __init__(self, cluster: Cluster, checkpoint: Path, *, lies: bool) -> None:
        self._cluster, self._checkpoint, self._lies = cluster, checkpoint, lies
        self.device = cluster.device

    def rollout(self, mode: Mode, tp: int = 1, transport: Transport | None = None) -> Remote:
        remote = self._cluster.rollout(mode, tp, transport)
        kept = _KeepsOldWeights(remote.side, remote.mode, remote.actors, remote.timeout_s, remote.logs)
        object.__setattr__(kept, "lies", self._lies)
        object.__setattr__(kept, "start_weights", self._checkpoint)
        return kept

    def train(self, mode: Mode, tp: int = 1, cp: int = 1, transport: Transport | None = None) -> Remote:
        return self._cluster.train(mode, tp, cp, transport)


@pytest.mark.cells(scope="control", subject="stale_weight_version")
def test_stale_weight_version(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    for lies, name in ((False, "old weights, said openly"), (True, cell.subject)):
        plan = runs.plan(f"stale-{'hidden' if lies else 'open'}", SamplingParams(), steps=2, prompts=2, group_size=4)
        try:
            runs.run(plan, _StaleCluster(runs.cluster, runs.checkpoint, lies=lies))
        except RunFailed as failure:
            seen = "differ" if lies else "rollout serves"
            evidence.control(name, seen in failure.reason, failure.reason)
        else:
            evidence.control(name, False, "the run finished")
