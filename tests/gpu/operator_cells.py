"""On a card: the contract's cells of an operator, in every layout, and the CPU backend's bytes where all arithmetic is IEEE."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from report import Report

from rlk.acceptance.measure import measure
from rlk.contract.judgments import JUDGMENTS
from rlk.contract.operators import SHAPES, TIERS
from rlk.evidence.accuracy import describe_accuracy
from rlk.evidence.bytes import compare, describe
from rlk.evidence.schema import Accuracy, Comparison
from rlk.kernels.case import Tensors, build_case

IEEE = ("embedding", "rms_norm", "qk_norm", "rope", "pack")
"""Operators without matrix instructions or exp: both backends give the same bytes."""


class _Sink:
    """Puts a cell's evidence into the report."""

    def __init__(self, report: Report, cell: str) -> None:
        self.report, self.cell = report, cell

    def comparison(self, outcome: Comparison) -> Comparison:
        self.report.holds(self.cell, outcome.equal, **({} if outcome.equal else {"why": describe(outcome)}))
        return outcome

    def accuracy(self, outcome: Accuracy) -> Accuracy:
        self.report.holds(self.cell, outcome.passed, worst=describe_accuracy(outcome))
        return outcome

    def kernels(self, side: str, ran: Iterable[dict[str, Any]]) -> None:
        backends = sorted({kernel["backend"] for kernel in ran if kernel["op"] != "rope.table"})  # the table is built on the CPU, once
        self.report.holds(self.cell, backends == ["triton"], ran=backends)


def cells(report: Report, operator: str) -> None:
    """Both tiers and all four judgments."""
    for tier in TIERS:
        for judgment in JUDGMENTS:
            measure(operator, tier, judgment, "triton", _Sink(report, f"{operator} {tier} {judgment.name}"))


def cpu_bytes(report: Report) -> None:
    """Outputs and every gradient equal the CPU backend's bytes."""
    for operator in IEEE:
        for tier in TIERS:
            for shape in SHAPES[operator][tier]:
                found, expected = (_everything(operator, shape, backend) for backend in ("triton", "cpu"))
                for name, value in expected.items():
                    outcome = compare(f"{operator}.{shape.name}.{name}", found[name].cpu(), value)
                    report.holds(
                        f"{operator} equals the CPU backend", outcome.equal, **({} if outcome.equal else {"why": describe(outcome)})
                    )


def _everything(operator: str, shape: Any, backend: str) -> Tensors:
    case = build_case(operator, shape, backend)
    launch = case.canonical()
    leaves = case.leaves(launch.placement, launch.placement.samples)
    with torch.enable_grad():
        weights = case.finish_weights(case.weight_gradients(launch, leaves))
        gradients = {f"d {name}": value for name, value in (case.gradients(launch) | weights).items()}
    return case.forward(launch) | gradients
