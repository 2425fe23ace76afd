"""One acceptance session on the controller: keeps records as they arrive, then judges them and writes the evidence."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from rlk.acceptance.cell import Cell, Platform
from rlk.acceptance.judge import conclude
from rlk.acceptance.waivers import load_waivers
from rlk.evidence.environment import freeze
from rlk.evidence.provenance import MANIFEST, Provenance, read_provenance
from rlk.evidence.report import write_report
from rlk.evidence.rundir import RunDirectory, new_run_id
from rlk.evidence.schema import CellRecord, Report, SessionFacts, Status, Verdict


class AcceptanceSession:
    """From the first moment of a session, when provenance and environment are frozen, to its report.

    Attributes: verdict (None until :meth:`close`), report_path, directory. Raises RunDirectoryError or OSError if the evidence cannot be
    written.
    """

    def __init__(
        self,
        config: pytest.Config,
        platform: Platform,
        cells: Sequence[Cell],
        selected: tuple[str, ...] | None,
        scopes: tuple[str, ...],
        matrix_source: str,
        declared: Mapping[str, Sequence[str]],
    ) -> None:
        self.verdict: Verdict | None = None
        self._root = config.rootpath
        self._allow_dirty = bool(config.getoption("allow_dirty"))
        self._platform, self._cells, self._selected, self._scopes = platform, cells, selected, scopes
        self._matrix_source, self._declared = matrix_source, declared
        self._started = datetime.now(UTC)
        self._run_id = new_run_id(self._started)
        self._command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
        self._provenance = read_provenance(self._root)
        self._environment = {**freeze(self._root), "pytest_plugins": _plugins(config)}
        self._records: list[CellRecord] = []
        self._running: dict[str, list[CellRecord]] = {}
        self._spoilt: dict[str, list[str]] = {}
        self._trouble: list[str] = []
        base = Path(config.getoption("artifacts") or self._root / "artifacts" / "refactor")
        self.directory = RunDirectory.create(base / platform / (self._provenance.sha or "unknown-sha") / self._run_id)
        frozen = {"provenance": self._provenance.model_dump(mode="json"), **self._environment}
        self.directory.write_json("environment.json", frozen)
        waivers = self._waiver_file(config.getoption("waivers"))
        self._waivers = load_waivers(waivers, self._provenance.sha, self._started.date(), {c.cell_id for c in cells})

    def add(self, record: CellRecord) -> None:
        """Take a cell's record; it counts once :meth:`ended` says that the tear-down went well too."""
        self._running.setdefault(record.cell_id, []).append(record)

    def spoil(self, cell_id: str, reason: str) -> None:
        """A set-up or tear-down that did not pass: whatever the cell reported, it is not green."""
        self._spoilt.setdefault(cell_id, []).append(reason)

    def ended(self, cell_id: str) -> None:
        """The cell's tear-down is over: append its record to ``cells.jsonl`` at once."""
        reasons = tuple(self._spoilt.pop(cell_id, ()))
        records = self._running.pop(cell_id, [])
        if not records and reasons:
            self._keep(CellRecord(cell_id=cell_id, status=Status.MISSING, reasons=reasons))
        for record in records:
            red = {"status": Status.FAIL, "reasons": (*record.reasons, *reasons), "timings_ms": {}}
            self._keep(record.model_copy(update=red) if reasons else record)

    def trouble(self, reason: str) -> None:
        """A fault of the session itself."""
        self._trouble.append(reason)

    def close(self, deselected: Collection[str]) -> Verdict:
        """Judge, write ``report.html``, ``report.md`` and ``report.json``; returns the verdict."""
        for cell_id in {*self._running, *self._spoilt}:
            self.spoil(cell_id, "ended without a tear-down")
            self.ended(cell_id)
        seen = {record.cell_id for record in self._records}
        for cell_id in sorted(set(deselected) - seen):
            self._keep(CellRecord(cell_id=cell_id, status=Status.MISSING, reasons=("deselected",)))
        session = SessionFacts(
            platform=self._platform,
            selected=self._selected,
            scopes=self._scopes,
            trouble=(*self._trouble, *self._provenance_trouble(read_provenance(self._root))),
            development=self._provenance.dirty,
        )
        self.records, self.verdict = conclude(self._cells, self._records, session)
        report = Report(
            run_id=self._run_id,
            command=self._command,
            started_at=self._started.isoformat(timespec="seconds"),
            finished_at=datetime.now(UTC).isoformat(timespec="seconds"),
            matrix_source=self._matrix_source,
            session=session,
            verdict=self.verdict,
            provenance=self._provenance,
            environment=self._environment,
            declared_kernels={kernel_id: tuple(operators) for kernel_id, operators in self._declared.items()},
            matrix=tuple(c.row() for c in self._cells),
            records=tuple(self.records),
            waivers=tuple(self._waivers),
        )
        self.report_path = write_report(self.directory, report)
        return self.verdict

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

    def _keep(self, record: CellRecord) -> None:
        self._records.append(record)
        self.directory.append_json("cells.jsonl", record.model_dump(mode="json"))

    def _waiver_file(self, named: str | None) -> Path | None:
        default = self._root / "acceptance" / "waivers.json"
        return Path(named) if named else (default if default.exists() else None)

    def _provenance_trouble(self, after: Provenance) -> list[str]:
        before, trouble = self._provenance, []
        if before.problem:
            trouble.append(before.problem)
        elif before.dirty and not self._allow_dirty:
            files = ", ".join(before.dirty_files[:3]) or f"as {MANIFEST} says"
            trouble.append(f"the checkout is dirty ({files}): commit, or pass --allow-dirty for a development run that cannot PASS")
        if before != after:
            trouble.append("the sources changed while the cells ran")
        return trouble


def _plugins(config: pytest.Config) -> list[str]:
    """Every plugin that took part, with its version where it was installed."""
    manager = config.pluginmanager
    installed = {f"{distribution.project_name} {distribution.version}" for _, distribution in manager.list_plugin_distinfo()}
    named = {
        str(name) for name, plugin in manager.list_name_plugin() if plugin is not None and "_pytest" not in getattr(plugin, "__name__", "")
    }
    return sorted(installed | {name for name in named if not name.isdigit()})
