"""The page of a comparison of two revisions: what it shows, worked out from ``revision.json`` alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlk.acceptance.revision import CellOutcome, Outcome, Revision, TimingChange
from rlk.evidence.report import write_pages
from rlk.evidence.rundir import RunDirectory
from rlk.evidence.schema import Status

MEANING = {
    Status.PASS: "Both revisions pass, and the candidate computes the baseline's bytes in every cell that the baseline has.",
    Status.FAIL: "The candidate computes other bytes than the baseline, or a revision's own run is red.",
    Status.MISSING: "What was to be compared could not be: this says nothing about the candidate's bytes.",
    Status.PARTIAL: "Whatever was run on both revisions has equal bytes; a part of the matrix was left out on purpose.",
}
TOLD = (Outcome.DIFFERENT, Outcome.NOT_COMPARABLE, Outcome.RED, Outcome.GONE, Outcome.NEW, Outcome.NOT_SELECTED)
"""Outcomes whose cells the page lists by name; of those not selected, the ones that ran in one of the revisions alone."""


@dataclass(frozen=True)
class Line:
    """One line of the reviewer's table: a subject under one workload, what differs there, and one of its timings if it has any."""

    workload: str
    mismatches: str
    bad: bool
    timing: TimingChange | None


class RevisionView:
    """The comparison's content, section by section."""

    def __init__(self, revision: Revision) -> None:
        self.revision = revision
        self.meaning = MEANING[revision.status]
        self.title = f"{revision.status} · {revision.platform} · {revision.baseline.sha[:12]} → {revision.candidate.sha[:12]}"
        self.counts = Counter(cell.outcome for cell in revision.cells)
        self.outcomes = [outcome for outcome in Outcome if self.counts[outcome]]
        self.values = sum(cell.values for cell in revision.cells)
        self.elements = sum(cell.elements for cell in revision.cells)
        self.different = sum(len(cell.different) for cell in revision.cells)
        machines = dict.fromkeys((revision.baseline.machine, revision.candidate.machine))
        self.machine = " → ".join(machines)

    @property
    def told(self) -> list[tuple[str, list[tuple[str, str]]]]:
        """(outcome, [(cell, why)]) of every cell that is not simply equal, judged in its run, or absent from both."""
        cells = [c for c in self.revision.cells if c.outcome is not Outcome.NOT_SELECTED or c.detail]
        found = [
            (o, [(c.cell_id, "; ".join(filter(None, (c.detail, *_named(c.different))))) for c in cells if c.outcome is o]) for o in TOLD
        ]
        return [(outcome.value, lines) for outcome, lines in found if lines]

    @property
    def lines(self) -> list[Line]:
        """The reviewer's table: the subjects and workloads that ran in both revisions, in matrix order."""
        group = {row.cell_id: f"{row.scope} {row.subject} {row.workload}" for row in self.revision.matrix}
        lines = []
        for name in dict.fromkeys(group.values()):
            cells = [c for c in self.revision.cells if group[c.cell_id] == name and c.outcome in _RAN]
            ids = {c.cell_id for c in cells}
            timings: list[TimingChange | None] = [t for t in self.revision.timings if t.cell_id in ids]
            lines += [Line(name, *_mismatches(cells), timing) for timing in (timings or [None] if cells else [])]
        return lines


_RAN = (Outcome.EQUAL, Outcome.DIFFERENT, Outcome.NOT_COMPARABLE, Outcome.JUDGED, Outcome.RED)


def write_comparison(revision: Revision, directory: RunDirectory) -> Path:
    """Write ``revision.json``, ``.md`` and ``.html`` into ``directory``; returns the path of the page."""
    return write_pages(directory, "revision", revision, RevisionView(revision))


def _mismatches(cells: Sequence[CellOutcome]) -> tuple[str, bool]:
    """What differs between the revisions in these cells, and whether that is bad."""
    values, different = sum(c.values for c in cells), sum(len(c.different) for c in cells)
    others = Counter(c.outcome for c in cells if not c.values)
    parts = [f"{different:,} of {values:,} values, {sum(c.elements for c in cells):,} elements"] if values else []
    parts += [f"{count} cells {outcome}" for outcome, count in others.items()]
    return "; ".join(parts), bool(different) or any(outcome is not Outcome.JUDGED for outcome in others)


def _named(names: tuple[str, ...]) -> list[str]:
    return [f"{len(names)} values differ: {', '.join(names[:4])}{', …' if len(names) > 4 else ''}"] if names else []
