"""Two revisions are run apart: each imports itself alone, a planted change of order is caught, and a wrong request starts nothing."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlk
import rlk.acceptance.gate  # loaded before pytester takes its snapshot of sys.modules: torch cannot be imported twice
import rlk.acceptance.revision_runs
from rlk.acceptance.revision import RevisionRefused
from rlk.acceptance.revision_runs import Checkout, check_out, require_own_imports, require_own_run, resolve, run_suite
from rlk.evidence.rundir import RunDirectory

pytest_plugins = ["pytester"]

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = Path(__file__).parent / "data" / "gate"
CELL = "cpu/ws1/logp/short-cpu/forward_accuracy"


def git(root: Path, *arguments: str) -> str:
    settings = ("user.name=test", "user.email=test@example.org", "commit.gpgsign=false", "core.hooksPath=/dev/null")
    command = ["git", *(word for setting in settings for word in ("-c", setting)), *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.strip()


def commit(root: Path, message: str) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", message)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A small project of two commits: the first has no acceptance suite, the second has one that would import the installed rlk."""
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    for name in ("pyproject.toml", "tiny_matrix.py"):
        shutil.copy(TEMPLATE / name, pytester.path)
    shutil.copy(TEMPLATE / "gitignore", pytester.path / ".gitignore")
    git(pytester.path, "init", "-q")
    commit(pytester.path, "no suite")
    (pytester.path / "acceptance").mkdir()
    shutil.copy(TEMPLATE / "cells.py", pytester.path / "acceptance" / "test_cells.py")
    (pytester.path / "acceptance" / "conftest.py").write_text("")
    (pytester.path / "rlk" / "acceptance").mkdir(parents=True)
    (pytester.path / "rlk" / "acceptance" / "plugin.py").write_text("")
    commit(pytester.path, "a suite")
    monkeypatch.setattr(rlk, "__path__", [str(pytester.path / "rlk"), *rlk.__path__])  # the checkout's own, as far as the plugin can see
    return pytester


def refused(project: pytest.Pytester, *arguments: str) -> str:
    """What a refused comparison says: one line on stderr, exit code 2, and no run directory."""
    result = project.runpytest_inprocess("acceptance", *arguments, no_reraise_ctrlc=True)
    assert result.ret == 2
    said = result.stderr.str().strip()
    assert "\n" not in said
    assert not list(project.path.glob("artifacts/*/*/*/*/baseline"))
    return said


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--candidate=HEAD",), "--candidate alone has nothing to be compared with: add --baseline REV"),
        (("--baseline=HEAD", "--allow-dirty"), "--allow-dirty does not go with --baseline"),
        (("--baseline=HEAD", "--collect-only"), "--collect-only does not go with --baseline"),
        (("--baseline=HEAD", "--rootdir=."), "--rootdir does not go with --baseline"),
        (("--baseline=nowhere",), "--baseline 'nowhere' is no commit of this repository: `git fetch`, or name another"),
        (("--baseline=--all",), "--baseline '--all' is no commit"),
        (("--baseline=",), "--baseline '' is no commit"),
        (("--baseline=HEAD", "--candidate="), "--candidate '' is no commit"),
        (("--baseline=HEAD", "--candidate=nowhere"), "--candidate 'nowhere' is no commit"),
        (("--baseline=HEAD~1",), r"--baseline 'HEAD~1' has no acceptance suite \(rlk/acceptance/plugin.py\): name a later commit"),
        (("--baseline=HEAD", "-m", "gpu"), "-m 'gpu' names no platform"),
    ],
)
def test_a_wrong_request_starts_nothing(project: pytest.Pytester, arguments: tuple[str, ...], reason: str) -> None:
    assert re.search(reason, refused(project, *arguments))


def test_a_session_that_is_no_acceptance_session_does_not_ignore_a_comparison(project: pytest.Pytester) -> None:
    project.makepyfile(test_other="def test_one(): pass")
    for option in ("--baseline=HEAD", "--baseline=", "--candidate=HEAD"):
        result = project.runpytest_inprocess("test_other.py", option, no_reraise_ctrlc=True)
        assert result.ret == 2
        result.stderr.fnmatch_lines(["acceptance: --baseline and --candidate compare runs of acceptance/: add that path"])


def test_a_dirty_checkout_and_a_copy_without_git_are_refused(project: pytest.Pytester) -> None:
    (project.path / "tiny_matrix.py").write_text("")
    assert "the checkout is dirty (tiny_matrix.py): commit" in refused(project, "--baseline=HEAD")
    shutil.rmtree(project.path / ".git")
    assert "needs a git checkout" in refused(project, "--baseline=HEAD")


def test_a_revision_that_would_borrow_another_rlk_is_refused(project: pytest.Pytester) -> None:
    """The project's own rlk is a stub: what it lacks, the installed one would lend."""
    assert "the baseline imports" in (said := refused(project, "--baseline=HEAD"))
    assert "not its own checkout" in said


def test_another_rlk_on_the_path_is_caught_and_kept_off_it(
    project: pytest.Pytester, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = Checkout("candidate", "a" * 40, tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)})
    with pytest.raises(RevisionRefused, match=r"the candidate imports .*, not its own checkout"):
        require_own_imports(elsewhere)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(tmp_path / "site")]))
    shas = resolve(project.path, "HEAD", None)
    checkout = check_out("baseline", project.path, shas[0], tmp_path / "baseline")
    assert checkout.env["PYTHONPATH"] == os.pathsep.join([str(checkout.root), str(tmp_path / "site")])
    caches = ("RLK_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "VLLM_CACHE_ROOT")
    assert all(checkout.env[name].startswith(str(tmp_path / "baseline")) for name in caches)
    assert git(checkout.root, "rev-parse", "HEAD") == shas[0] == shas[1]


def test_the_plugin_judges_no_checkout_with_another_rlk(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rlk, "__path__", [str(ROOT / "rlk")])
    assert f"rlk is imported from {ROOT / 'rlk'}, not from this checkout" in refused(project)


def test_a_session_that_does_not_start_or_ends_unlike_its_report_is_refused(project: pytest.Pytester, tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    checkout, target = (
        Checkout("baseline", git(project.path, "rev-parse", "HEAD"), project.path, env),
        RunDirectory.create(tmp_path / "out"),
    )
    with pytest.raises(
        RevisionRefused, match=r"the baseline cannot be run so: acceptance: rlk is imported from .*, not from this checkout"
    ):
        run_suite(checkout, ["acceptance"], target)
    shutil.rmtree(project.path / "rlk")
    (project.path / "acceptance" / "conftest.py").write_text("import atexit, os\natexit.register(os._exit, 7)\n")
    with pytest.raises(RevisionRefused, match="the baseline ended with exit code 7, its report calls for 1"):
        run_suite(checkout, ["acceptance"], RunDirectory.create(tmp_path / "broken"))
    cells = project.path / "acceptance" / "test_cells.py"
    cells.write_text(cells.read_text().replace("    evidence.compare_tokens(", "    os.kill(os.getpid(), 9)\n    evidence.compare_tokens("))
    assert run_suite(checkout, ["acceptance"], RunDirectory.create(tmp_path / "killed")) is None
    assert (tmp_path / "killed" / "baseline.log").is_file()


def copied_sources(target: Path) -> None:
    """The tracked files of this tree as they are on disk."""
    for name in git(ROOT, "ls-files", "-z").split("\0"):
        source = ROOT / name
        if name and (source.is_symlink() or source.is_file()):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target / name, follow_symlinks=False)


@pytest.mark.slow
def test_a_planted_order_is_caught_between_two_commits(tmp_path: Path) -> None:
    """The candidate sums the exponentials of a logprob from the left instead of by the row tree; both revisions' own runs are green."""
    root = tmp_path / "rlk"
    copied_sources(root)
    git(tmp_path, "init", "-q", str(root))
    before = commit(root, "baseline")
    header = root / "kernels" / "_native" / "lse.h"
    tree, left = "state.sum = row_tree_sum(values, n);", "state.sum = 0.0f;\n  for (i = 0; i < n; ++i) state.sum += values[i];"
    assert header.read_text().count(tree) == 1
    header.write_text(header.read_text().replace(tree, left))
    after = commit(root, "candidate")
    command = [sys.executable, "-m", "pytest", "-m", "cpu", "acceptance/", "--baseline", before[:10], "--cell", CELL]
    env = {**os.environ, "PYTHONPATH": str(root), "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    (page,) = root.glob(f"artifacts/refactor/cpu/{after}/*-against-{before[:12]}/revision.json")
    revision: dict[str, Any] = json.loads(page.read_text())
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith(f"FAIL  {page.with_suffix('.html')}")
    assert revision["reasons"] == [f"1 cells have other bytes: {CELL}"]
    for role, sha in (("baseline", before), ("candidate", after)):
        side = revision[role]
        assert (side["sha"], side["dirty"], side["status"], side["sealed"]) == (sha, False, "PARTIAL", True)
    (changed,) = [cell for cell in revision["cells"] if cell["outcome"] == "different"]
    assert changed["cell_id"] == CELL
    assert "logp" in {kernel["op"] for kernel in revision["kernels"]}
    assert revision["environment"] == []
    _require_own_run_is_strict(root, Path(revision["baseline"]["directory"]), before)


def _require_own_run_is_strict(root: Path, run: Path, sha: str) -> None:
    """A run of another commit, or one that imported another rlk, is not taken for the revision's."""
    require_own_run(Checkout("baseline", sha, root, {}), run)
    with pytest.raises(RevisionRefused, match="is of commit"):
        require_own_run(Checkout("baseline", "0" * 40, root, {}), run)
    report = json.loads((run / "report.json").read_text())
    for found in (str(ROOT / "rlk" / "__init__.py"), None):
        report["environment"]["import_paths"]["rlk"] = found
        (run / "report.json").write_text(json.dumps(report))
        with pytest.raises(RevisionRefused, match="imported rlk from"):
            require_own_run(Checkout("baseline", sha, root, {}), run)
