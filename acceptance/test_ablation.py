"""Ablations: R/R must be zero, arms with a native side must run natively and report what they find."""

from __future__ import annotations

import pytest

from acceptance.engines import Runs, compare_logprobs, hand_in_run
from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence
from rlk.contract.workloads import ARMS
from rlk.loop.plan import EngineMode

MODES: dict[str, EngineMode] = {"P": "native", "R": "strict"}


@pytest.mark.cells(scope="ablation")
def test_arm(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    arm = next(a for a in ARMS if a.name == cell.subject)
    train, rollout = (MODES[side] for side in arm.attention.split("/"))
    summary = runs.arm(train, rollout)
    hand_in_run(evidence, summary)
    compare_logprobs(evidence, summary)
    evidence.fact("mismatched_tokens", summary.mismatched_tokens)
