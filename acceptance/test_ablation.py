"""Ablations: R/R must be zero, arms with a native side must run natively and report what they find."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from acceptance.engines import Runs, compare_logprobs, hand_in_run, kernels_of
from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence
from rlk.acceptance.judge import Findings, judge_cell
from rlk.acceptance.matrix import ROUTE_OPERATORS
from rlk.contract.arms import ARMS, MIXED_MODES, ROUTES, Arm, Side, routes_of
from rlk.evidence.schema import KernelUse, Status
from rlk.kernels.registry import declared_kernels
from rlk.loop.records import RunSummary

SIDES: tuple[Side, ...] = ("train", "rollout")


@pytest.mark.cells(scope="ablation")
def test_arm(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    arm = next(a for a in ARMS if a.name == cell.subject)
    summary = runs.arm(arm.mode("train"), arm.mode("rollout"))
    hand_in_run(evidence, summary)
    compare_logprobs(evidence, summary)
    evidence.fact("mismatched_tokens", summary.mismatched_tokens)
    if arm.mode("train") in MIXED_MODES:
        require_routes(arm, summary.manifest.engines)
        plant(cell, evidence, summary)


def require_routes(arm: Arm, engines: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ValueError unless every route ran, in modules whose operators, looked up in the live engine, are those of the arm, and the
    backward pass ran kernels of all the arm's operators and of no other."""
    for side in SIDES:
        own = routes_of(arm.mode(side))
        for route in ROUTES:
            operators, runs = engines[side]["operators"][route], engines[side]["routes"][route]["runs"]
            if operators != ("rlk" if route in own else "native") or not runs:
                raise ValueError(f"{arm.name}: {route} of the {side} side ran {runs} times with {operators} operators")
    ran = {kernel["op"].partition(".")[0] for kernel in engines["train"]["routes"]["backward"]["kernels"]}
    if ran != (named := {op for route in routes_of(arm.mode("train")) for op in ROUTE_OPERATORS[route]}):
        raise ValueError(f"{arm.name}: the backward pass ran kernels of {sorted(ran)}, the arm names {sorted(named)}")


def plant(cell: Cell, evidence: Evidence, summary: RunSummary) -> None:
    """Judge the cell again as if one route of one side had silently run the other operators: red for every route and side."""
    ran = {name: uses for side in SIDES for name, uses in kernels_of(side, summary.manifest.engines[side]).items()}
    own, native = sorted({side for side, _ in cell.strict}), [name for name in cell.native if "." in name]
    green, why = _judged(cell, summary, ran)
    evidence.control("the same evidence without the fault passes", green, why)
    for name in own:
        green, why = _judged(cell, summary, {**ran, name: []})
        evidence.control(f"{name} ran native operators", not green, why)
    for name in native:
        green, why = _judged(cell, summary, {**ran, name: ran[own[0]]})
        evidence.control(f"{name} ran rlk operators", not green, why)


def _judged(cell: Cell, summary: RunSummary, ran: Mapping[str, list[dict[str, Any]]]) -> tuple[bool, str]:
    kernels = [KernelUse(side=side, **use) for side, uses in ran.items() for use in uses]
    findings = Findings(comparisons=list(summary.comparisons), kernels=kernels, facts=dict.fromkeys(cell.facts, "present"))
    record = judge_cell(cell, findings, [], declared_kernels())
    return record.status is Status.PASS, "; ".join(record.reasons) or "no reason"
