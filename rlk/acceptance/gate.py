"""The pytest hooks of an acceptance session. The verdict starts from the matrix, not from what pytest ran.

Whatever is skipped, deselected, crashed, repeated or unknown cannot pass. Under xdist the workers judge their cells and the controller
keeps the records; without it one process does both.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable
from typing import Any, NoReturn

import pytest
from pydantic import ValidationError

from rlk.acceptance.cell import PLATFORMS, Cell, Platform
from rlk.acceptance.collector import Evidence
from rlk.acceptance.judge import Findings, exit_code, judge_cell
from rlk.acceptance.selection import select_cells
from rlk.acceptance.session import AcceptanceSession
from rlk.evidence.rundir import RunDirectoryError
from rlk.evidence.schema import CellRecord, Status
from rlk.kernels.registry import declared_kernels

EVIDENCE = pytest.StashKey[Evidence]()
JUDGED = pytest.StashKey[int]()
Matrix = Callable[[Platform], tuple[Cell, ...]]
FORBIDDEN_MARKS = ("skip", "skipif", "xfail")


class Gate:
    """Hooks and state of one acceptance session. Raises SelectionError for a selection that names no cell."""

    def __init__(self, config: pytest.Config, platform: Platform, matrix: Matrix, matrix_source: str) -> None:
        self._matrix, self._matrix_source = matrix, matrix_source
        self._platform = platform
        self._cells = {c.cell_id: c for c in matrix(platform)}
        self._scopes = tuple(dict.fromkeys(config.getoption("scope")))
        self._selected = select_cells(matrix(platform), config.getoption("cell"), config.getoption("shard"), self._scopes)
        self._to_run = [c for c in self._cells.values() if c.required and (self._selected is None or c.cell_id in self._selected)]
        self._declared = declared_kernels()
        self._deselected: set[str] = set()
        self._acceptance: AcceptanceSession | None = None
        option = config.option
        self._lists_only = option.collectonly or option.showfixtures or option.show_fixtures_per_test

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        config = session.config
        if self._lists_only or hasattr(config, "workerinput"):
            return
        cells = self._matrix(self._platform)
        try:
            self._acceptance = AcceptanceSession(
                config, self._platform, cells, self._selected, self._scopes, self._matrix_source, self._declared
            )
        except (OSError, RunDirectoryError) as error:
            pytest.exit(f"the evidence cannot be written: {error}", returncode=2)
        os._exit = _exit_of(os.getpid(), os._exit, self.exit_code)

    def exit_code(self) -> int:
        """What the session leaves with: its verdict's code, 1 if it has not come to one, 3 if it judges nothing."""
        if self._acceptance is None:
            return 3
        return 1 if self._acceptance.verdict is None else exit_code(self._acceptance.verdict)

    def parametrize(self, metafunc: pytest.Metafunc, marker: pytest.Mark) -> None:
        """Give a marked test the cells that it covers and that are to run; a marker that fits no cell of any platform is an error."""

        def fits(cell: Cell) -> bool:
            return all(getattr(cell, name) == value for name, value in marker.kwargs.items())

        try:
            known = not marker.args and any(fits(c) for platform in PLATFORMS for c in self._matrix(platform))
        except AttributeError as error:
            raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: {error}") from None
        if not known:
            raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid} covers {marker.kwargs}, which fits no cell of the matrix")
        marks = getattr(pytest.mark, self._platform)
        metafunc.parametrize("cell", [pytest.param(c, id=c.cell_id, marks=marks) for c in self._to_run if fits(c)])

    def collector(self, item: pytest.Item) -> Evidence:
        """A new collector for one item."""
        item.stash[EVIDENCE] = evidence = Evidence()
        return evidence

    def pytest_deselected(self, items: Iterable[pytest.Item]) -> None:
        self._deselected |= {cell.cell_id for item in items if (cell := _cell_of(item)) is not None}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        cell = _cell_of(item)
        report.__dict__.update(rlk_cell=cell and cell.cell_id, rlk_record=None)
        if cell is None or report.when != "call":
            return report
        record = self._judge(item, cell, report, call)
        report.__dict__["rlk_record"] = record.model_dump_json()
        if record.status is not Status.PASS and not report.failed:
            report.outcome = "failed"
            report.longrepr = "\n".join([*record.reasons, f"repeat with: pytest -m {cell.platform} acceptance/ --cell {cell.cell_id}"])
        return report

    def _judge(self, item: pytest.Item, cell: Cell, report: pytest.TestReport, call: pytest.CallInfo[None]) -> CellRecord:
        item.stash[JUDGED] = times = item.stash.get(JUDGED, 0) + 1
        trouble = _trouble(item, report, call)
        if times > 1:
            trouble.append(f"ran {times} times in one session: no reruns and no subtests, repeat inside the cell")
        if self._cells.get(cell.cell_id) != cell:
            trouble.append("the test made this cell itself: only the matrix names cells")
        findings = item.stash[EVIDENCE].close() if EVIDENCE in item.stash else Findings()
        try:
            return judge_cell(cell, findings, trouble, self._declared)
        except ValidationError as error:
            return judge_cell(cell, Findings(), [*trouble, f"evidence does not fit the schema: {error}"], {})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._acceptance is None:
            return
        cell_id, record = report.__dict__.get("rlk_cell"), report.__dict__.get("rlk_record")
        if record:
            self._acceptance.add(CellRecord.model_validate_json(record))
        elif report.outcome != "passed" and cell_id:
            self._acceptance.spoil(cell_id, f"{report.when} {report.outcome}: {_tail(report.longrepr)}")
        elif report.outcome != "passed":
            self._acceptance.trouble(f"{report.nodeid} {report.outcome} ({report.when}): {_tail(report.longrepr)}")
        if cell_id and report.when == "teardown":
            self._acceptance.ended(cell_id)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if self._acceptance is not None and report.outcome != "passed":
            self._acceptance.trouble(f"collection of {report.nodeid or 'the session'} {report.outcome}: {_tail(report.longrepr)}")

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> Generator[None, object, object]:
        if self._acceptance is None:
            return (yield)
        result = None
        try:
            result = yield
        except BaseException as error:
            self._acceptance.trouble(f"the session's tear-down failed: {type(error).__name__}: {error}")
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            self._acceptance.trouble(f"pytest ended with exit code {int(exitstatus)} before all cells were judged")
        self._acceptance.close(self._deselected)
        session.exitstatus = self.exit_code()
        return result

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._acceptance is None or self._acceptance.verdict is None:
            return
        terminalreporter.section("acceptance", sep="=")
        for line in self._acceptance.summary_lines():
            terminalreporter.write_line(line)

    def pytest_unconfigure(self) -> None:
        if self._acceptance is not None and (verdict := self._acceptance.verdict) is not None:
            green = f" (scope {', '.join(verdict.green_scopes)} green)" if verdict.green_scopes else ""
            print(f"{verdict.status}{green}  {self._acceptance.report_path}", file=sys.stdout, flush=True)


def _cell_of(item: pytest.Item) -> Cell | None:
    callspec = getattr(item, "callspec", None)
    cell = callspec.params.get("cell") if callspec else None
    return cell if isinstance(cell, Cell) else None


def _trouble(item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None]) -> list[str]:
    trouble = [
        f"the test is marked {mark.name}: a cell is never skipped or excused"
        for mark in item.iter_markers()
        if mark.name in FORBIDDEN_MARKS
    ]
    if report.skipped and not hasattr(report, "wasxfail"):
        trouble.append(f"skipped inside the test: {_tail(report.longrepr)}")
    elif call.excinfo is not None:
        trouble.append(call.excinfo.exconly(tryshort=True).strip()[:2000])
    elif not report.passed:
        trouble.append(f"{report.outcome}: {_tail(report.longrepr)}")
    return trouble


def _tail(longrepr: object) -> str:
    return str(longrepr).strip()[-600:]


def _exit_of(controller: int, leave: Callable[[int], NoReturn], verdict: Callable[[], int]) -> Any:
    """``os._exit`` for the rest of a session's process: who ends it with 0, an engine's handler at exit say, ends it with the verdict."""

    def leave_as_judged(status: int) -> NoReturn:
        leave(status or verdict() if os.getpid() == controller else status)

    return leave_as_judged
