"""What the report shows, worked out from ``report.json`` alone; the templates only lay it out."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

from pydantic import JsonValue

from rlk.evidence.accuracy import describe_accuracy
from rlk.evidence.bytes import describe
from rlk.evidence.schema import Accuracy, CellRecord, Control, MatrixRow, Report, Status, Verdict
from rlk.evidence.topologies import TopologyRow, judgments, topology_rows
from rlk.evidence.updates import Update, total_tokens, updates_of

NOT_SELECTED, UNSUPPORTED = "not selected", "unsupported"
TITLES = {
    "ws1": "Operators",
    "ws2": "Layers and topologies",
    "chain": "Chain: every intermediate of the model",
    "integration": "Integration: updates on real engines",
    "ablation": "Ablation arms",
    "control": "Negative controls",
    "performance": "Performance",
}
MEANING = {
    Status.PASS: "Every required cell passed: what must be equal is equal to the last byte.",
    Status.FAIL: "At least one required cell failed, or the session itself cannot be trusted.",
    Status.MISSING: "At least one required cell has no result.",
    Status.PARTIAL: "A part of the matrix, or a dirty checkout, was run on purpose: this is no verdict over the platform.",
}


@dataclass(frozen=True)
class Coverage:
    """Counts of one scope; required = passed + failed + missing + not_selected.

    elements: compared byte for byte. measured: elements held against the fp32 reference within a tolerance.
    """

    scope: str
    required: int
    passed: int
    failed: int
    missing: int
    not_selected: int
    unsupported: int
    elements: int
    mismatched_bytes: int
    measured: int
    expects_mismatch: bool


@dataclass(frozen=True)
class GridCell:
    """One square of a scope's grid: its state ("PASS", "FAIL", …, "not selected", "unsupported") and a sentence for the pointer."""

    cell_id: str
    state: str
    title: str


@dataclass(frozen=True)
class Grid:
    """One scope: labels of the rows, columns, and a square for each pair (None where the matrix has no such cell).

    A row of unsupported cells alone is left out; they are listed with their reasons elsewhere.
    """

    title: str
    columns: list[str]
    rows: list[tuple[str, list[GridCell | None]]]


@dataclass(frozen=True)
class Failure:
    """A red cell: its reasons, every comparison that differs in words, and the command that repeats it."""

    record: CellRecord
    differences: list[str]
    repro: str
    waivers: list[str]


@dataclass(frozen=True)
class Arm:
    """One ablation arm: what was expected, how much of it differed."""

    row: MatrixRow
    state: str
    mismatched: int
    elements: int


@dataclass(frozen=True)
class OperatorRow:
    """One operator: (backend, kernel id, calls) per side; "" as kernel id where a read-back is required and absent."""

    op: str
    sides: dict[str, list[tuple[str, str, int]]]


@dataclass(frozen=True)
class Timing:
    """Samples of one timing in milliseconds."""

    cell_id: str
    name: str
    samples: int
    median: float
    least: float
    most: float


class View:
    """The report's content, section by section."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.verdict = report.verdict
        self.meaning = _meaning(report.verdict)
        self.title = f"{report.verdict.status} · {report.verdict.platform} · {(report.provenance.sha or 'unknown commit')[:12]}"
        self._record = {r.cell_id: r for r in report.records}
        self.seconds = _seconds(report.started_at, report.finished_at)
        self.coverage = [self._coverage(scope) for scope in dict.fromkeys(row.scope for row in report.matrix)]
        self.tokens = self._tokens()
        self.elements = sum(c.elements for c in self.coverage)
        self.mismatched_bytes = sum(c.mismatched_bytes for c in self.coverage)
        self.measured = sum(c.measured for c in self.coverage)

    @property
    def unsupported(self) -> list[tuple[str, list[str]]]:
        """(reason, cells) of the cells that are listed and not required."""
        reasons: dict[str, list[str]] = {}
        for row in self.report.matrix:
            if row.unsupported:
                reasons.setdefault(row.unsupported, []).append(row.cell_id)
        return list(reasons.items())

    @property
    def failures(self) -> list[Failure]:
        """Red cells, failed before missing."""
        red = [r for r in self.report.records if r.status is not Status.PASS]
        return [self._failure(r) for r in sorted(red, key=lambda r: r.status is Status.MISSING)]

    @property
    def grids(self) -> list[Grid]:
        """One grid per scope, in matrix order."""
        return [self._grid(c.scope) for c in self.coverage]

    @property
    def runs(self) -> list[tuple[str, list[Update]]]:
        """(workload, updates) of the integration scope; the cells of a workload complete each other's facts."""
        found: dict[str, tuple[dict[str, JsonValue], list[CellRecord]]] = {}
        for row, record in self._pairs("integration"):
            facts, records = found.setdefault(f"{row.subject} {row.workload}", ({}, []))
            records.append(record)
            facts.update({name: value for name, value in record.facts.items() if name not in facts})
        return [(name, updates_of(facts, [c for r in records for c in r.comparisons])) for name, (facts, records) in found.items()]

    @property
    def topologies(self) -> list[TopologyRow]:
        """Topologies of the ws2 scope with what was compared in each."""
        return topology_rows(self._pairs("ws2"))

    @property
    def topology_judgments(self) -> list[str]:
        """Columns of their table."""
        return judgments(self.topologies)

    @property
    def arms(self) -> list[Arm]:
        """Ablation arms, unsupported ones included."""
        arms = []
        for row in self.report.matrix:
            if row.scope == "ablation":
                comparisons = record.comparisons if (record := self._record.get(row.cell_id)) else ()
                arms.append(
                    Arm(row, self._state(row), sum(c.mismatched_elements for c in comparisons), sum(c.elements for c in comparisons))
                )
        return arms

    @property
    def accuracies(self) -> list[tuple[CellRecord, Accuracy]]:
        """(record, its accuracy nearest to the tolerance or furthest beyond it) of every cell that measured one, worst first."""
        found = [(r, max(r.accuracies, key=_excess)) for r in self.report.records if r.accuracies]
        return sorted(found, key=lambda pair: -_excess(pair[1]))

    @property
    def controls(self) -> list[tuple[str, Control]]:
        """(cell, planted fault), faults that went uncaught first."""
        found = [(r.cell_id, c) for r in self.report.records for c in r.controls]
        return sorted(found, key=lambda pair: pair[1].caught)

    @property
    def sides(self) -> list[str]:
        """Sides that have operators: trainer, rollout, then others."""
        found = {side for row in self.operators for side in row.sides}
        return sorted(found, key=lambda side: (side != "train", side != "rollout", side))

    @property
    def operators(self) -> list[OperatorRow]:
        """Every operator with what ran on each side, incomplete ones first."""
        calls: Counter[tuple[str, str, str, str]] = Counter()
        for use in (use for r in self.report.records for use in r.kernels):
            calls[use.op, use.side, use.backend, use.kernel_id] += use.calls
        rows: dict[str, dict[str, list[tuple[str, str, int]]]] = {}
        for (op, side, backend, kernel_id), count in sorted(calls.items()):
            rows.setdefault(op, {}).setdefault(side, []).append((backend, kernel_id, count))
        for row in self.report.matrix:
            for side, op in row.strict if row.cell_id in self._record else ():
                rows.setdefault(op, {}).setdefault(side, [("", "", 0)])
        found = [OperatorRow(op, sides) for op, sides in sorted(rows.items())]
        return sorted(found, key=lambda row: all(kernel_id for uses in row.sides.values() for _, kernel_id, _ in uses))

    @property
    def timings(self) -> list[Timing]:
        """Timings of green cells; red ones carry none."""
        return [
            Timing(r.cell_id, name, len(samples), statistics.median(samples), min(samples), max(samples))
            for r in self.report.records
            for name, samples in r.timings_ms.items()
            if samples
        ]

    @property
    def environment(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """(group, rows) of the frozen environment."""
        plain = [(name, value) for name, value in self.report.environment.items() if not isinstance(value, dict | list)]
        groups = [
            ("Machine", [(name.replace("_", " "), _size(value) if name.endswith("_bytes") else _text(value)) for name, value in plain])
        ]
        for name, value in self.report.environment.items():
            if isinstance(value, dict):
                groups.append((name.replace("_", " ").capitalize(), [(key, _text(v)) for key, v in value.items()]))
            elif isinstance(value, list) and value:
                groups.append((name.replace("_", " ").capitalize(), [(str(i + 1), _text(v)) for i, v in enumerate(value)]))
        return [(title, rows) for title, rows in groups if rows]

    def _pairs(self, scope: str) -> list[tuple[MatrixRow, CellRecord]]:
        return [(row, self._record[row.cell_id]) for row in self.report.matrix if row.scope == scope and row.cell_id in self._record]

    def _tokens(self) -> int:
        """Tokens of every run once, however many cells judge it."""
        of_run: dict[tuple[str, str, str], int] = {}
        for row in self.report.matrix:
            if record := self._record.get(row.cell_id):
                run = (row.scope, row.subject, row.workload)
                of_run[run] = max(of_run.get(run, 0), total_tokens(record.facts))
        return sum(of_run.values())

    def _state(self, row: MatrixRow) -> str:
        if row.unsupported:
            return UNSUPPORTED
        record = self._record.get(row.cell_id)
        return record.status if record else NOT_SELECTED

    def _coverage(self, scope: str) -> Coverage:
        rows = [row for row in self.report.matrix if row.scope == scope]
        states = Counter(self._state(row) for row in rows)
        records = [record for _, record in self._pairs(scope)]
        return Coverage(
            scope=scope,
            required=len(rows) - states[UNSUPPORTED],
            passed=states[Status.PASS],
            failed=states[Status.FAIL],
            missing=states[Status.MISSING],
            not_selected=states[NOT_SELECTED],
            unsupported=states[UNSUPPORTED],
            elements=sum(r.elements for r in records),
            mismatched_bytes=sum(r.mismatched_bytes for r in records),
            measured=sum(_measured(r) for r in records),
            expects_mismatch=any(row.expect == "different" for row in rows),
        )

    def _failure(self, record: CellRecord) -> Failure:
        differences = [describe(c) for c in record.comparisons if not c.equal]
        differences += [describe_accuracy(a) for a in record.accuracies if not a.passed]
        waivers = [f"{w.reason} (until {w.expires})" for w in self.report.waivers if w.cell_id == record.cell_id and not w.note]
        command = f"pytest -m {self.verdict.platform} acceptance/ --cell {record.cell_id}"
        return Failure(record, [d for d in differences if d not in record.reasons], command, waivers)

    def _grid(self, scope: str) -> Grid:
        rows = [row for row in self.report.matrix if row.scope == scope]
        turned = scope == "chain"
        column_of: Callable[[MatrixRow], str] = lambda row: row.subject if turned else row.judgment
        alone = len({row.workload for row in rows}) == 1
        same = len({row.subject for row in rows}) == 1

        def label(row: MatrixRow) -> str:
            return row.judgment if turned else row.subject if alone else row.workload if same else f"{row.subject} {row.workload}"

        columns = list(dict.fromkeys(column_of(row) for row in rows))
        squares: dict[str, dict[str, GridCell]] = {}
        for row in rows:
            squares.setdefault(label(row), {})[column_of(row)] = self._square(row)
        live = {name: found for name, found in squares.items() if any(square.state != UNSUPPORTED for square in found.values())}
        return Grid(TITLES.get(scope, scope), columns, [(name, [found.get(c) for c in columns]) for name, found in live.items()])

    def _square(self, row: MatrixRow) -> GridCell:
        record, state = self._record.get(row.cell_id), self._state(row)
        title = row.unsupported or (record.reasons[0] if record and record.reasons else "")
        if record and not title:
            title = f"{record.elements} elements compared, {record.mismatched_bytes} bytes differ" if record.elements else ""
            title = title or (f"{_measured(record)} elements within tolerance" if record.accuracies else "caught")
        return GridCell(row.cell_id, state, f"{row.cell_id}: {title or state}")


def _meaning(verdict: Verdict) -> str:
    if verdict.green_scopes:
        return f"Every required cell of {', '.join(verdict.green_scopes)} passed; the rest of the platform was not asked for."
    return MEANING[verdict.status]


def _seconds(started: str, finished: str) -> float | None:
    try:
        return (datetime.fromisoformat(finished) - datetime.fromisoformat(started)).total_seconds()
    except (TypeError, ValueError):
        return None


def _measured(record: CellRecord) -> int:
    return sum(a.elements for a in record.accuracies)


def _excess(accuracy: Accuracy) -> float:
    """Error beyond the tolerance, as a share of it; void measurements come first."""
    return math.inf if accuracy.problem else accuracy.worst_excess / accuracy.atol


def _size(value: JsonValue) -> str:
    return f"{value / 2**30:.1f} GiB" if isinstance(value, int) else _text(value)


def _text(value: JsonValue) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(v)}" for name, v in value.items())
    return ", ".join(_text(v) for v in value) if isinstance(value, list) else "none" if value is None else str(value)
