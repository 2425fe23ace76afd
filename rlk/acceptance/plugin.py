"""pytest plugin: turns ``pytest -m cpu acceptance/`` into a judged session that fails closed.

Inactive and cheap in every other session: it adds options and markers, and refuses cells that are run without a judge. All else lives in
:mod:`rlk.acceptance.gate`, which is loaded when an acceptance session starts.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import pytest

from rlk.acceptance.platforms import PLATFORMS, why_not_here

if TYPE_CHECKING:
    from rlk.acceptance.cell import Cell
    from rlk.acceptance.collector import Evidence
    from rlk.acceptance.gate import Gate

DEFAULT_MATRIX = "rlk.acceptance.matrix:enumerate_cells"
NO_SESSION = "a cell is judged only in an acceptance session: run `pytest -m cpu acceptance/` from the repository root"
RERUN_PLUGINS = ("rerun", "flaky", "retry")
GATE: pytest.StashKey[Gate] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rlk", "rlk acceptance")
    group.addoption("--cell", action="append", default=[], metavar="ID", help="run one cell (repeatable); such a session ends PARTIAL")
    group.addoption("--shard", metavar="I/N", help="run part I of N (of --scope, if named); ends PARTIAL, joined by `rlk validate --merge`")
    group.addoption(
        "--scope",
        action="append",
        default=[],
        metavar="SCOPE",
        help="run one scope (repeatable): exit 0 if all of it is green, ends PARTIAL",
    )
    group.addoption("--artifacts", metavar="DIR", help="where run directories go (default: artifacts/refactor)")
    group.addoption("--waivers", metavar="FILE", help="waivers that annotate the report (default: acceptance/waivers.json)")
    group.addoption("--allow-dirty", action="store_true", help="judge a dirty checkout; the report says so and ends PARTIAL, never PASS")
    parser.addini("rlk_matrix", "function that enumerates the cells of a platform", default=DEFAULT_MATRIX)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cells(**fields): the cells of the matrix that this test covers, by field")
    for platform in PLATFORMS:
        config.addinivalue_line("markers", f"{platform}: cells of the {platform} platform")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if not _is_acceptance(config) or config.option.help or config.option.version:
        return None
    asked = str(config.option.markexpr or "cpu").strip()
    try:
        platform = next((p for p in PLATFORMS if p == asked), None)
        if platform is None:
            raise ValueError(f"-m {asked!r} names no platform: use exactly one of {', '.join(PLATFORMS)}")
        if refusal := why_not_here(platform) or _weakened(config):
            raise ValueError(refusal)
        from rlk.acceptance.gate import Gate

        module, _, function = str(config.getini("rlk_matrix")).partition(":")
        gate = Gate(config, platform, getattr(importlib.import_module(module), function), f"{module}:{function}")
    except (ImportError, AttributeError, RuntimeError, ValueError) as error:
        print(f"acceptance: {error}", file=sys.stderr)
        return 2
    config.stash[GATE] = gate
    config.pluginmanager.register(gate, "rlk-gate")
    config.option.markexpr = platform
    return None


def _is_acceptance(config: pytest.Config) -> bool:
    home = (config.rootpath / "acceptance").resolve()
    paths = [(config.invocation_params.dir / str(a).split("::")[0]).resolve() for a in config.args]
    return any(path == home or home in path.parents for path in paths)


def _weakened(config: pytest.Config) -> str:
    """Which plugin or option would weaken the verdict, and the remedy; "" if none."""
    for name, plugin in config.pluginmanager.list_name_plugin():
        if plugin is not None and os.sep not in str(name) and any(word in str(name) for word in RERUN_PLUGINS):
            return f"plugin {name!r} repeats failed tests, and a cell that fails once has failed: remove it"
    if any(str(override).startswith("rlk_matrix") for override in config.option.override_ini or ()):
        return "-o rlk_matrix would choose another matrix than the committed one: leave it out"
    if config.inipath is None or config.inipath.parent != config.rootpath:
        return f"the configuration {config.inipath} is not the repository's own: leave out -c"
    if not __debug__:
        return "python -O drops assertions: run without -O and PYTHONOPTIMIZE"
    return ""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("cells")
    if marker is None:
        return
    gate = metafunc.config.stash.get(GATE, None)
    if gate is None:
        metafunc.parametrize("cell", [None], ids=["not-judged"])
    else:
        gate.parametrize(metafunc, marker)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cells") is not None and GATE not in item.config.stash:
        pytest.fail(NO_SESSION, pytrace=False)


@pytest.fixture
def cell() -> Cell:
    """The cell under judgment (parametrised by the plugin)."""
    raise LookupError("mark the test with @pytest.mark.cells(...): the matrix, not the test, names the cells")


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Evidence:
    """Collector of this cell's findings."""
    gate = request.config.stash.get(GATE, None)
    if gate is None:
        raise RuntimeError(NO_SESSION)
    return gate.collector(request.node)
