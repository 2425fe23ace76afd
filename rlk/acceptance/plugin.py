"""pytest plugin: turns ``pytest -m cpu acceptance/`` into a judged session that fails closed, or a comparison of two.

Inactive and cheap in every other session: it adds options and markers, and refuses cells that are run without a judge. All else lives in
:mod:`rlk.acceptance.gate`, which is loaded when an acceptance session starts.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import rlk
from rlk.acceptance.platforms import PLATFORMS, VISIBLE, Platform, own_card_first, why_not_here

if TYPE_CHECKING:
    from rlk.acceptance.cell import Cell
    from rlk.acceptance.collector import Evidence
    from rlk.acceptance.gate import Gate

DEFAULT_MATRIX = "rlk.acceptance.matrix:enumerate_cells"
NO_SESSION = "a cell is judged only in an acceptance session: run `pytest -m cpu acceptance/` from the repository root"
RERUN_PLUGINS = ("rerun", "flaky", "retry")
GATE_NAME = "rlk-gate"
OTHER_CODE = ("TRITON_INTERPRET", "TRITON_KERNEL_OVERRIDE")
"""Variables under which Triton runs something else on a card than the kernels that the ids name."""
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
    group.addoption("--baseline", metavar="REV", help="run the suite of this commit and of --candidate, and compare their bytes")
    group.addoption("--candidate", metavar="REV", help="what --baseline is compared with (default: HEAD)")
    group.addoption("--allow-dirty", action="store_true", help="judge a dirty checkout; the report says so and ends PARTIAL, never PASS")
    parser.addini("rlk_matrix", "function that enumerates the cells of a platform", default=DEFAULT_MATRIX)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "cells(**fields): the cells of the matrix that this test covers, by field")
    for platform in PLATFORMS:
        config.addinivalue_line("markers", f"{platform}: cells of the {platform} platform")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests() -> Generator[None]:
    try:
        return (yield)
    except SystemExit as error:
        raise pytest.UsageError(f"a conftest left with sys.exit({error.code}): no session started, let it raise what is wrong") from None


@pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_cmdline_main")
def pytest_leave_as_judged(config: pytest.Config) -> Generator[None, int | None, int | None]:
    """After everything else, whatever hooks have made of it: an acceptance session leaves with its verdict."""
    try:
        code = yield
    except SystemExit:
        if GATE not in config.stash:
            raise
        code = 0
    gate = config.stash.get(GATE, None)
    return code if gate is None or hasattr(config, "workerinput") else code or gate.exit_code()


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if config.option.help or config.option.version:
        return None
    compares = config.option.baseline is not None or config.option.candidate is not None
    if not _is_acceptance(config):
        if compares:
            print("acceptance: --baseline and --candidate compare runs of acceptance/: add that path", file=sys.stderr)
        return 2 if compares else None
    asked = str(config.option.markexpr or "cpu").strip()
    try:
        platform = next((p for p in PLATFORMS if p == asked), None)
        if platform is None:
            raise ValueError(f"-m {asked!r} names no platform: use exactly one of {', '.join(PLATFORMS)}")
        if platform in VISIBLE and hasattr(config, "workerinput"):
            own_card_first(platform, int(config.workerinput["workerid"].removeprefix("gw")))
        if refusal := why_not_here(platform) or _weakened(config, platform):
            raise ValueError(refusal)
        if compares:
            return _compare_revisions(config, platform)
        from rlk.acceptance.gate import Gate

        module, _, function = str(config.getini("rlk_matrix")).partition(":")
        gate = Gate(config, platform, getattr(importlib.import_module(module), function), f"{module}:{function}")
    except (ImportError, AttributeError, RuntimeError, ValueError) as error:
        print(f"acceptance: {error}", file=sys.stderr)
        return 2
    config.stash[GATE] = gate
    config.pluginmanager.register(gate, GATE_NAME)
    config.option.markexpr = platform
    return None


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """``-n auto`` on cards is a worker for each, whose first card that is (:func:`own_card_first`); elsewhere, and where
    PYTEST_XDIST_AUTO_NUM_WORKERS says one, xdist's own number."""
    asked = str(config.option.markexpr).strip()
    if asked not in VISIBLE or "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ or not _is_acceptance(config):
        return None
    import torch

    return max(1, torch.cuda.device_count())


def _compare_revisions(config: pytest.Config, platform: Platform) -> int:
    from rlk.acceptance.revision_runs import compare_revisions

    option, arguments = config.option, [str(argument) for argument in config.invocation_params.args]
    if option.baseline is None:
        raise ValueError("--candidate alone has nothing to be compared with: add --baseline REV")
    refused = {"--allow-dirty": option.allow_dirty, "--collect-only": option.collectonly, "--rootdir": option.rootdir}
    for name, given in refused.items():
        if given:
            raise ValueError(f"{name} does not go with --baseline, which judges clean checkouts of its own: leave it out")
    if config.invocation_params.dir != config.rootpath or any(Path(str(argument)).is_absolute() for argument in config.args):
        raise ValueError(
            f"--baseline is run from {config.rootpath} with relative paths: use `pytest -m {platform} acceptance/ --baseline …`"
        )
    artifacts = Path(option.artifacts) if option.artifacts else None
    return compare_revisions(config.rootpath, platform, option.baseline, option.candidate, arguments, artifacts)


def _is_acceptance(config: pytest.Config) -> bool:
    home = (config.rootpath / "acceptance").resolve()
    paths = [(config.invocation_params.dir / str(a).split("::")[0]).resolve() for a in config.args]
    return any(path == home or home in path.parents for path in paths)


def _weakened(config: pytest.Config, platform: Platform) -> str:
    """What would weaken the verdict, a plugin, an option, a variable or another rlk, and the remedy; "" if none."""
    if config.pluginmanager.is_blocked(GATE_NAME):
        return f"-p no:{GATE_NAME} would leave the cells without a judge: leave it out"
    if platform != "cpu" and (named := [name for name in OTHER_CODE if os.environ.get(name, "0") not in ("", "0")]):
        return f"under {named[0]} other code runs than the kernels that are judged: unset it"
    for name, plugin in config.pluginmanager.list_name_plugin():
        if plugin is not None and os.sep not in str(name) and any(word in str(name) for word in RERUN_PLUGINS):
            return f"plugin {name!r} repeats failed tests, and a cell that fails once has failed: remove it"
    if any(str(override).startswith("rlk_matrix") for override in config.option.override_ini or ()):
        return "-o rlk_matrix would choose another matrix than the committed one: leave it out"
    own = config.rootpath / "rlk"
    if own.is_dir() and not any(own.samefile(path) for path in rlk.__path__):
        return f"rlk is imported from {rlk.__path__[0]}, not from this checkout: set PYTHONPATH={config.rootpath}, or install it from here"
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
