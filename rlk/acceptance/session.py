"""One acceptance session on the controller: collects records as they arrive, then judges them and writes the evidence."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

import pytest

from rlk.acceptance.cell import Cell, Platform
from rlk.acceptance.judge import Session, complete, judge_session
from rlk.acceptance.waivers import load_waivers
from rlk.evidence.environment import freeze
from rlk.evidence.provenance import Provenance, read_provenance
from rlk.evidence.report import write_report
from rlk.evidence.rundir import RunDirectory, new_run_id
from rlk.evidence.schema import CellRecord, Report, Status, Verdict


def repro_command(cell: Cell) -> str:
    """Command that repeats one cell alone."""
    return f"pytest -m {cell.platform} acceptance/ --cell {cell.cell_id}"


class AcceptanceSession:
    """State between ``pytest_configure`` and the end. Under xdist every worker has one, but only the controller's opens a run directory."""

    current: ClassVar[AcceptanceSession | None] = None

    def __init__(
        self, config: pytest.Config, platform: Platform, cells: Sequence[Cell], selected: frozenset[str] | None, matrix_source: str
    ) -> None:
        self.config = config
        self.platform = platform
        self.cells = cells
        self.selected = selected
        self.matrix_source = matrix_source
        self.deselected: set[str] = set()
        self.verdict: Verdict | None = None
        self._records: list[CellRecord] = []
        self._trouble: list[str] = []
        self._spoilt: dict[str, list[str]] = {}

    def to_run(self) -> list[Cell]:
        """Required cells that this session is to run."""
        return [c for c in self.cells if c.required and (self.selected is None or c.cell_id in self.selected)]

    def open(self) -> None:
        """Freeze provenance and environment and create the run directory, before any cell runs."""
        type(self).current = self
        root = self.config.rootpath
        self.started = datetime.now(UTC)
        self.run_id = new_run_id(self.started)
        self.provenance = read_provenance(root)
        base = Path(self.config.getoption("artifacts") or root / "artifacts" / "refactor")
        self.directory = RunDirectory.create(base / self.platform / (self.provenance.sha or "unknown-sha") / self.run_id)
        self.environment = freeze(root)
        self.directory.write_json("environment.json", {"provenance": self.provenance.model_dump(mode="json"), **self.environment})
        self.waivers = load_waivers(self._waiver_file(root), self.provenance.sha, self.started.date())

    def _waiver_file(self, root: Path) -> Path | None:
        named = self.config.getoption("waivers")
        return Path(named) if named else (default if (default := root / "acceptance" / "waivers.json").exists() else None)

    def add(self, record: CellRecord) -> None:
        """Keep a cell's record and append it to ``cells.jsonl`` at once."""
        self._records.append(record)
        self.directory.append_json("cells.jsonl", record.model_dump(mode="json"))

    def spoil(self, cell_id: str, reason: str) -> None:
        """A set-up or tear-down that did not pass: whatever the cell reported, it fails."""
        self._spoilt.setdefault(cell_id, []).append(reason)

    def trouble(self, reason: str) -> None:
        """A fault of the session itself."""
        self._trouble.append(reason)

    def close(self) -> Verdict:
        """Judge, write ``report.html``, ``report.md`` and ``report.json``; returns the verdict."""
        after = read_provenance(self.config.rootpath)
        trouble = [*self._trouble, *self._provenance_trouble(self.provenance, after)]
        development = bool(self.config.getoption("allow_dirty")) and self.provenance.dirty
        session = Session(self.platform, self.selected, tuple(trouble), development)
        self.records = complete(self.cells, [self._final(r) for r in self._with_spoilt()], session)
        self.verdict = judge_session(self.cells, self.records, session)
        report = Report(
            run_id=self.run_id,
            command=shlex.join(["pytest", *self.config.invocation_params.args]),
            started_at=self.started.isoformat(timespec="seconds"),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
            matrix_source=self.matrix_source,
            verdict=self.verdict,
            provenance=self.provenance.model_dump(mode="json"),
            environment=self.environment,
            matrix=tuple(c.row() for c in self.cells),
            records=tuple(self.records),
            waivers=tuple(self.waivers),
        )
        self.report_path = write_report(self.directory, report)
        return self.verdict

    def _with_spoilt(self) -> list[CellRecord]:
        present = {r.cell_id for r in self._records}
        absent = [CellRecord(cell_id=i, status=Status.MISSING, reasons=tuple(r)) for i, r in self._spoilt.items() if i not in present]
        absent += [
            CellRecord(cell_id=i, status=Status.MISSING, reasons=("deselected",))
            for i in sorted(self.deselected - present - self._spoilt.keys())
        ]
        return [*self._records, *absent]

    def _final(self, record: CellRecord) -> CellRecord:
        reasons = self._spoilt.get(record.cell_id)
        if not reasons or record.status is not Status.PASS:
            return record
        return record.model_copy(update={"status": Status.FAIL, "reasons": tuple(reasons), "timings_ms": {}})

    def _provenance_trouble(self, before: Provenance, after: Provenance) -> list[str]:
        trouble = []
        if before.problem:
            trouble.append(before.problem)
        if before.dirty and not self.config.getoption("allow_dirty"):
            files = ", ".join(before.dirty_files[:3])
            trouble.append(f"the checkout is dirty ({files}): commit, or pass --allow-dirty for a development run that cannot PASS")
        if (before.sha, before.tree_digest) != (after.sha, after.tree_digest):
            trouble.append("the sources changed while the cells ran")
        return trouble

    def summary_lines(self) -> list[str]:
        """What the terminal shows at the end."""
        verdict = self.verdict
        assert verdict is not None
        lines = [
            f"required {verdict.required} = {verdict.passed} passed + {verdict.failed} failed + {verdict.missing} missing"
            f" + {verdict.not_selected} not selected; {verdict.unsupported} unsupported",
            f"{sum(r.elements for r in self.records)} elements compared in {len(self.records)} cells",
        ]
        lines += [f"{r.status}  {r.cell_id}: {r.reasons[0]}" for r in self.records if r.status is not Status.PASS]
        return lines + [f"session: {reason}" for reason in verdict.reasons]
