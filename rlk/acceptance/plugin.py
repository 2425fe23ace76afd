"""pytest plugin: turns ``pytest -m cpu acceptance/`` into a judged session that fails closed.

Inactive in every other session. A cell's test asks for the fixtures ``cell`` and ``evidence`` and hands its findings in; whatever is
skipped, deselected, crashed, repeated or unknown cannot pass, because the verdict starts from the matrix, not from what pytest ran.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Generator, Iterable
from typing import Any

import pytest
from pydantic import ValidationError

from rlk.acceptance.cell import PLATFORMS, Cell, Platform
from rlk.acceptance.judge import EXIT_CODE, Findings, judge_cell
from rlk.acceptance.platforms import why_not_here
from rlk.acceptance.selection import SelectionError, select_cells
from rlk.acceptance.session import AcceptanceSession, repro_command
from rlk.evidence.bytes import compare, compare_fp32
from rlk.evidence.schema import CellRecord, Comparison, Control, KernelUse
from rlk.kernels.registry import declared_kernels

DEFAULT_MATRIX = "rlk.acceptance.matrix:enumerate_cells"
RECORD, CELL = "rlk_record", "rlk_cell"
STATE = pytest.StashKey["AcceptanceSession"]()
FINDINGS = pytest.StashKey[Findings]()
RERUN_PLUGINS = ("rerunfailures", "flaky", "retry", "pytest_rerunfailures", "pytest-retry")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlk", "rlk acceptance")
    group.addoption("--cell", action="append", default=[], metavar="ID", help="run one cell (repeatable); such a session ends PARTIAL")
    group.addoption("--shard", metavar="I/N", help="run part I of N; ends PARTIAL, joined by `rlk validate --merge`")
    group.addoption("--artifacts", metavar="DIR", help="where run directories go (default: artifacts/refactor)")
    group.addoption("--waivers", metavar="FILE", help="waivers that annotate the report (default: acceptance/waivers.json)")
    group.addoption("--allow-dirty", action="store_true", help="judge a dirty checkout; the report says so and ends PARTIAL, never PASS")
    parser.addini("rlk_matrix", "function that enumerates the cells of a platform", default=DEFAULT_MATRIX)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cells(**fields): the cells of the matrix that this test covers, by field")
    for platform in PLATFORMS:
        config.addinivalue_line("markers", f"{platform}: cells of the {platform} platform")
    if not _is_acceptance(config):
        return
    platform = _platform(config)
    for name, _ in config.pluginmanager.list_name_plugin():
        if any(rerun in str(name) for rerun in RERUN_PLUGINS) and config.pluginmanager.get_plugin(name) is not None:
            pytest.exit(f"plugin {name!r} repeats failed tests, and a cell that fails twice has failed: remove it", returncode=2)
    module, _, function = str(config.getini("rlk_matrix")).partition(":")
    cells: tuple[Cell, ...] = getattr(importlib.import_module(module), function)(platform)
    try:
        selected = select_cells(cells, config.getoption("cell"), config.getoption("shard"))
    except SelectionError as error:
        pytest.exit(str(error), returncode=2)
    config.stash[STATE] = AcceptanceSession(config, platform, cells, selected, f"{module}:{function}")
    if not hasattr(config, "workerinput"):
        config.stash[STATE].open()
    config.option.markexpr = platform


def _is_acceptance(config: pytest.Config) -> bool:
    home = (config.rootpath / "acceptance").resolve()
    paths = [(config.invocation_params.dir / str(a).split("::")[0]).resolve() for a in config.args]
    return any(path == home or home in path.parents for path in paths)


def _platform(config: pytest.Config) -> Platform:
    asked = str(config.option.markexpr or "cpu").strip()
    for platform in PLATFORMS:
        if asked == platform:
            reason = why_not_here(platform)
            if reason:
                pytest.exit(reason, returncode=2)
            return platform
    pytest.exit(f"-m {asked!r} names no platform: use exactly one of cpu, cuda, rocm", returncode=2)


def _state(config: pytest.Config) -> AcceptanceSession | None:
    return config.stash.get(STATE, None)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("cells")
    if marker is None:
        return
    state = _state(metafunc.config)
    if state is None:
        metafunc.parametrize("cell", [None], ids=["run-as-pytest-acceptance"])
        return
    cells = [c for c in state.to_run() if all(getattr(c, name) == value for name, value in marker.kwargs.items())]
    marks = getattr(pytest.mark, state.platform)
    metafunc.parametrize("cell", [pytest.param(c, id=c.cell_id, marks=marks) for c in cells])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    state = _state(config)
    if state is None:
        return
    for item in items:
        cell = _cell_of(item)
        if cell is not None:
            item.user_properties.append((CELL, cell.cell_id))


def pytest_deselected(items: Iterable[pytest.Item]) -> None:
    for item in items:
        state = _state(item.config)
        cell = _cell_of(item)
        if state is not None and cell is not None:
            state.deselected.add(cell.cell_id)


def _cell_of(item: pytest.Item) -> Cell | None:
    callspec = getattr(item, "callspec", None)
    cell = callspec.params.get("cell") if callspec else None
    return cell if isinstance(cell, Cell) else None


@pytest.fixture
def cell() -> Cell:
    """The cell under judgment (parametrised by the plugin)."""
    raise LookupError("mark the test with @pytest.mark.cells(...): the matrix, not the test, names the cells")


class Evidence:
    """Where a cell's test hands in what it found. Nothing raises on a mismatch: the judge decides, after all is in."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings

    def compare(self, name: str, actual: Any, expected: Any) -> Comparison:
        """Compare two tensors, or two lists of fp32 values, byte for byte and hand the outcome in."""
        outcome = compare_fp32(name, actual, expected) if isinstance(actual, list) else compare(name, actual, expected)
        return self.comparison(outcome)

    def comparison(self, outcome: Comparison) -> Comparison:
        """Hand in a comparison made elsewhere."""
        self._findings.comparisons.append(outcome)
        return outcome

    def kernels(self, side: str, ran: Iterable[dict[str, Any]]) -> None:
        """Hand in a worker's own read-back: dicts with op, backend, kernel_id, calls."""
        self._findings.kernels.extend(KernelUse(side=side, **use) for use in ran)

    def control(self, name: str, caught: bool, detail: str) -> None:
        """Hand in a planted fault and whether it was caught."""
        self._findings.controls.append(Control(name=name, caught=caught, detail=detail))

    def fact(self, name: str, value: Any) -> None:
        """Record a JSON-able fact."""
        self._findings.facts[name] = value

    def timing(self, name: str, milliseconds: Iterable[float]) -> None:
        """Record raw timing samples in milliseconds; dropped if the cell is not green."""
        self._findings.timings_ms[name] = tuple(milliseconds)


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Evidence:
    """Collector of this cell's findings."""
    if _state(request.config) is None:
        raise RuntimeError("no acceptance session: run `pytest -m cpu acceptance/` from the repository root")
    request.node.stash[FINDINGS] = findings = Findings()
    return Evidence(findings)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    cell = _cell_of(item)
    if cell is None or _state(item.config) is None or report.when != "call":
        return report
    trouble = []
    if hasattr(report, "wasxfail"):
        trouble.append(f"marked xfail: {report.wasxfail or 'no reason'}")
    if report.skipped:
        trouble.append("skipped inside the test")
    if call.excinfo is not None and not report.skipped:
        trouble.append(call.excinfo.exconly(tryshort=True).strip()[:2000])
    try:
        record = judge_cell(cell, item.stash.get(FINDINGS, Findings()), trouble, declared_kernels())
    except ValidationError as error:
        record = judge_cell(cell, Findings(), [f"evidence does not fit the schema: {error}"], {})
    report.user_properties.append((RECORD, record.model_dump_json()))
    if record.reasons and not report.failed:
        report.outcome = "failed"
        report.longrepr = "\n".join([*record.reasons, f"repeat with: {repro_command(cell)}"])
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    state = AcceptanceSession.current
    if state is None:
        return
    properties = dict(report.user_properties)
    cell_id = properties.get(CELL)
    if RECORD in properties and report.when == "call":
        state.add(CellRecord.model_validate_json(str(properties[RECORD])))
    elif cell_id is None and report.outcome == "failed":
        state.trouble(f"{report.nodeid} failed ({report.when}): {str(report.longrepr)[-200:]}")
    elif cell_id is not None and report.when in ("setup", "teardown") and report.outcome != "passed":
        state.spoil(str(cell_id), f"{report.when} {report.outcome}: {str(report.longrepr)[-600:]}")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    state = AcceptanceSession.current
    if state is not None and report.outcome != "passed":
        state.trouble(f"collection of {report.nodeid} {report.outcome}: {str(report.longrepr)[-300:]}")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    state = _state(session.config)
    if state is None or hasattr(session.config, "workerinput"):
        return
    if session.config.option.collectonly:
        session.exitstatus = 3
        return
    if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        state.trouble(f"pytest ended with exit code {int(exitstatus)} before all cells were judged")
    session.exitstatus = EXIT_CODE[state.close().status]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    state = _state(config)
    if state is None or state.verdict is None:
        return
    terminalreporter.section("acceptance", sep="=")
    for line in state.summary_lines():
        terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    state = _state(config)
    if state is not None and state.verdict is not None:
        print(f"{state.verdict.status}  {state.report_path}", file=sys.stdout, flush=True)
    AcceptanceSession.current = None
