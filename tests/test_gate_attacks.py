"""Attacks on the acceptance gate: each is a small project in which one thing is wrong, and none of them may end with exit code 0."""

from __future__ import annotations

import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import rlk.acceptance.gate  # noqa: F401  loaded before pytester takes its snapshot of sys.modules: torch cannot be imported twice
from rlk.acceptance.validate import ValidationRefused, merge, seal, validate_run
from rlk.evidence.provenance import MANIFEST, write_manifest

pytest_plugins = ["pytester"]

TEMPLATE = Path(__file__).parent / "data" / "gate"
ATTACKS = tomllib.loads((TEMPLATE / "attacks.toml").read_text())["attack"]
EXIT_CODES = {"PASS": 0, "FAIL": 1, "MISSING": 1, "": 2, "PARTIAL": 3}
CELLS = "acceptance/test_cells.py"
CHAIN = "cpu/chain/train_vs_rollout/tiny/logp"
COMPARED = "    evidence.compare_tokens("


def git(root: Path, *arguments: str) -> None:
    settings = ("user.name=test", "user.email=test@example.org", "commit.gpgsign=false", "core.hooksPath=/dev/null")
    command = ["git", *(word for setting in settings for word in ("-c", setting)), *arguments]
    subprocess.run(command, cwd=root, check=True, capture_output=True)


class Project:
    """The template in a directory of its own: edit, commit, run, read what the run left."""

    def __init__(self, pytester: pytest.Pytester) -> None:
        self.pytester = pytester
        self.root = pytester.path
        shutil.copytree(TEMPLATE, self.root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "attacks.toml"))
        (self.root / "acceptance").mkdir()
        (self.root / "cells.py").rename(self.root / CELLS)
        (self.root / "gitignore").rename(self.root / ".gitignore")

    def edit(self, changes: Iterable[tuple[str, str]]) -> None:
        text = (self.root / CELLS).read_text()
        for old, new in changes:
            assert old in text
            text = text.replace(old, new, 1)
        (self.root / CELLS).write_text(text)

    def before_comparison(self, code: str) -> None:
        self.edit([(COMPARED, textwrap.indent(code, "    ") + "\n" + COMPARED)])

    def write(self, name: str, text: str) -> None:
        (self.root / name).parent.mkdir(exist_ok=True)
        (self.root / name).write_text(text)

    def commit(self) -> None:
        git(self.root, "init", "-q")
        git(self.root, "add", "-A")
        git(self.root, "commit", "-q", "-m", "project")

    def run(self, *arguments: str, target: str = "acceptance") -> pytest.RunResult:
        return self.pytester.runpytest_inprocess(target, *arguments, no_reraise_ctrlc=True)

    def run_apart(self, *arguments: str, interpreter: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *interpreter, "-m", "pytest", "acceptance", *arguments]
        return subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=120)

    def runs(self) -> list[Path]:
        frozen = self.root.glob("artifacts/refactor/*/*/*/environment.json")
        return [path.parent for path in sorted(frozen, key=lambda path: path.stat().st_mtime_ns)]

    def report(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.runs()[-1] / "report.json").read_text())
        return report

    def expect(self, code: int, status: str, reason: str) -> None:
        """The last run ended with this exit code and status, for a reason that matches, and left evidence that is whole."""
        report = self.report()
        said = "\n".join([*report["verdict"]["reasons"], *(reason for r in report["records"] for reason in r["reasons"])])
        assert (code, report["verdict"]["status"]) == (EXIT_CODES[status], status), said
        assert re.search(reason, said, re.DOTALL), said
        assert validate_run(self.runs()[-1]) == []


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "_exit", os._exit)  # a session keeps it to the end of its process
    return Project(pytester)


@pytest.mark.parametrize("way", ["entry point", "conftest", "both"])
def test_baseline_passes_however_the_plugin_is_loaded(project: Project, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "entry point":
        shutil.copy(TEMPLATE.parents[2] / "conftest.py", project.root)
    if way == "conftest":
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    project.commit()
    result = project.run("-W", "error")
    project.expect(result.ret, "PASS", "")
    (run,) = project.runs()
    assert result.stdout.str().rstrip().endswith(f"PASS  {run / 'report.html'}")
    counts = {"required": 3, "passed": 3, "failed": 0, "missing": 0, "not_selected": 0, "unsupported": 1}
    assert project.report()["verdict"].items() >= counts.items()
    assert {path.name for path in run.iterdir()} == {"cells.jsonl", "environment.json", "report.html", "report.json", "report.md"}


@pytest.mark.parametrize("attack", ATTACKS, ids=[a["name"].replace(" ", "-") for a in ATTACKS])
def test_attack(project: Project, attack: dict[str, Any]) -> None:
    for name, text in attack.get("files", {}).items():
        project.write(name, text)
    project.edit(attack.get("changes", ()))
    if "before" in attack:
        project.before_comparison(attack["before"])
    project.commit()
    if "dirty" in attack:
        project.write(attack["dirty"], "")
    result = project.run(*attack.get("args", ()), target=attack.get("target", "acceptance"))
    if attack["status"]:
        project.expect(result.ret, attack["status"], attack["reason"])
    else:
        said = result.stderr.str().strip()
        assert result.ret == 2
        assert re.search(attack["reason"], said)
        assert "\n" not in said
        assert project.runs() == []


def test_a_process_that_leaves_with_code_0_before_its_verdict_leaves_with_1(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(code: int) -> None:
        raise RuntimeError(f"left with {code}")

    monkeypatch.setattr(os, "_exit", leave)
    project.before_comparison("os._exit(0)")
    project.commit()
    project.expect(project.run().ret, "FAIL", "left with 1")


@pytest.mark.parametrize("red", [True, False])
def test_a_process_that_leaves_with_code_0_after_its_verdict_leaves_with_it(project: Project, red: bool) -> None:
    project.write("conftest.py", "import atexit, os\natexit.register(lambda: os._exit(0))")
    if red:
        project.before_comparison("train[0] = 1.0")
    project.commit()
    project.expect(project.run_apart().returncode, "FAIL" if red else "PASS", "")


def test_a_conftest_that_leaves_with_code_0_is_an_error(project: Project) -> None:
    project.write("acceptance/conftest.py", "raise SystemExit(0)")
    project.commit()
    done = project.run_apart()
    assert (done.returncode, project.runs()) == (pytest.ExitCode.USAGE_ERROR, [])
    assert "a conftest left with sys.exit(0)" in done.stderr


def test_a_crashed_worker_loses_its_cell_and_the_session_and_no_other_cell(project: Project) -> None:
    project.before_comparison("os._exit(0)")
    project.commit()
    done = project.run_apart("-n", "2")
    assert project.runs(), done.stdout + done.stderr
    project.expect(done.returncode, "FAIL", "crashed")
    states = {record["cell_id"]: record["status"] for record in project.report()["records"]}
    assert states == {CHAIN: "MISSING", "cpu/ablation/G00/tiny/logprob": "PASS", "cpu/control/flipped_bit/tiny/caught": "PASS"}


def test_a_killed_controller_leaves_a_run_that_does_not_validate(project: Project) -> None:
    project.before_comparison("os.kill(os.getpid(), 9)")
    project.commit()
    assert project.run_apart().returncode == -9
    (run,) = project.runs()
    assert validate_run(run) == [f"{run} has no report.json: the run did not reach its end"]
    with pytest.raises(ValidationRefused, match="did not reach its end"):
        seal(run)


@pytest.mark.parametrize("way", ["-p no:rlk.acceptance.plugin", "--noconftest -p no:rlk.acceptance.plugin", "another path", "another root"])
def test_without_the_gate_no_cell_passes(project: Project, way: str) -> None:
    shutil.copy(TEMPLATE.parents[2] / "conftest.py", project.root)
    project.commit()
    arguments = way.split() if way.startswith("-") else [f"--rootdir={project.root.parent}"] if way == "another root" else []
    target = "." if way == "another path" else "acceptance"
    result = project.run(*arguments, target=target)
    assert result.ret != 0
    assert result.parseoutcomes().get("passed", 0) == 0
    assert project.runs() == []


def test_without_assertions_no_session_starts(project: Project) -> None:
    project.commit()
    done = project.run_apart(interpreter=("-O",))
    assert (done.returncode, project.runs()) == (2, [])
    assert "python -O drops assertions" in done.stderr


@pytest.mark.parametrize("option", ["--collect-only", "--fixtures", "--markers"])
def test_a_list_judges_nothing_and_never_ends_with_0(project: Project, option: str) -> None:
    project.commit()
    assert project.run(option, "-q").ret == 3
    assert project.runs() == []


def test_a_red_cell_carries_no_timing_and_a_green_one_does(project: Project) -> None:
    project.commit()
    project.run()
    assert project.report()["records"][0]["timings_ms"] == {"forward": [1.5, 1.25]}
    project.before_comparison("train[0] = 1.0")
    project.commit()
    project.expect(project.run().ret, "FAIL", "elements differ")
    assert project.report()["records"][0]["timings_ms"] == {}
    assert "Nothing recorded" in (project.runs()[-1] / "report.html").read_text()


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no git", "the commit is unknown"),
        ("no commit yet", "no commit yet"),
        ("dirty tree", r"dirty \(acceptance/test_cells.py\)"),
        ("untracked file", r"dirty \(acceptance/conftest.py\)"),
        ("ignored source", r"dirty \(acceptance/conftest.py\)"),
        ("ignored extension module", r"dirty \(acceptance/fast.abi3.so\)"),
        ("bytecode that its source does not check", r"dirty \(__pycache__/tiny_matrix.*pyc\)"),
        ("change hidden from git", r"dirty \(acceptance/test_cells.py\)"),
        ("manifest and another file", "1 files differ from .*first acceptance/conftest.py"),
        ("manifest and a changed file", "1 files differ from .*first acceptance/test_cells.py"),
        ("manifest of a dirty tree", r"dirty \(as rlk-manifest.json says\)"),
    ],
)
def test_sources_that_are_not_the_commit(project: Project, fault: str, reason: str) -> None:
    if fault == "no commit yet":
        git(project.root, "init", "-q")
    elif fault != "no git":
        project.commit()
    if fault == "ignored source":
        (project.root / ".git" / "info" / "exclude").write_text("conftest.py\n")
    if fault == "ignored extension module":
        (project.root / ".git" / "info" / "exclude").write_text("*.so\n")
        project.write("acceptance/fast.abi3.so", "")
    if fault == "bytecode that its source does not check":
        py_compile.compile(str(project.root / "tiny_matrix.py"), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    if fault == "change hidden from git":
        git(project.root, "update-index", "--assume-unchanged", CELLS)
    if fault == "manifest of a dirty tree":
        project.edit([("import os", "import os  # changed,")])
    if fault.startswith("manifest"):
        write_manifest(project.root, project.root / MANIFEST)
        shutil.rmtree(project.root / ".git")
    if fault in ("untracked file", "ignored source", "manifest and another file"):
        project.write("acceptance/conftest.py", "")
    if fault in ("dirty tree", "change hidden from git", "manifest and a changed file"):
        project.edit([("import os", "import os  # changed")])
    project.expect(project.run().ret, "FAIL", reason)
    if "manifest and" not in fault and fault not in ("no git", "no commit yet"):
        project.expect(project.run("--allow-dirty").ret, "PARTIAL", "")


def test_a_verified_manifest_stands_for_the_checkout(project: Project) -> None:
    project.commit()
    write_manifest(project.root, project.root / MANIFEST)
    shutil.rmtree(project.root / ".git")
    project.expect(project.run().ret, "PASS", "")


@pytest.mark.parametrize("allowed", [(), ("--allow-dirty",)])
def test_sources_that_change_while_the_cells_run(project: Project, allowed: tuple[str, ...]) -> None:
    project.before_comparison("open('tiny_matrix.py', 'a').write('# later')")
    project.commit()
    project.expect(project.run(*allowed).ret, "FAIL", "the sources changed while the cells ran")


def test_waivers_annotate_and_change_nothing(project: Project) -> None:
    project.before_comparison("train[0] = 1.0")
    project.commit()
    project.expect(project.run().ret, "FAIL", "")
    sha = project.report()["provenance"]["sha"]
    today = datetime.now(UTC).date()
    made = [
        {"sha": sha, "expires": str(today + timedelta(days=1))},
        {"sha": "0" * 40, "expires": str(today + timedelta(days=1))},
        {"sha": sha, "expires": str(today - timedelta(days=1))},
        {"sha": sha, "expires": "soon"},
        {"sha": sha, "expires": str(today), "cell_id": "cpu/chain/none"},
    ]
    project.write("artifacts/waivers.json", json.dumps([{"cell_id": CHAIN, "reason": "known <b>"} | waiver for waiver in made]))
    project.expect(project.run("--waivers", "artifacts/waivers.json").ret, "FAIL", "elements differ")
    notes = [waiver["note"] for waiver in project.report()["waivers"]]
    assert notes == [
        "", "stale: written for another commit", "expired", "void: 'soon' is not a date", "void: names no cell of this platform",
    ]  # fmt: skip
    page = (project.runs()[-1] / "report.html").read_text()
    assert "known &lt;b&gt;" in page
    assert "stale: written for another commit" in page
    project.write("artifacts/waivers.json", "[{")
    project.expect(project.run("--waivers", "artifacts/waivers.json").ret, "FAIL", "elements differ")
    assert "unreadable" in project.report()["waivers"][0]["note"]


def test_shards_are_partial_and_their_merge_passes(project: Project) -> None:
    project.commit()
    for shard in ("1/2", "2/2"):
        project.expect(project.run("--shard", shard).ret, "PARTIAL", "")
    runs = project.runs()
    seal(runs[0])
    assert merge(runs, project.root / "artifacts" / "merged").status == "PASS"
    assert validate_run(project.root / "artifacts" / "merged") == []
    assert merge(runs[:1], project.root / "artifacts" / "half").status == "MISSING"
    assert merge([*runs, runs[0]], project.root / "artifacts" / "twice").status == "PASS"


def test_a_scope_that_is_green_ends_with_0_and_is_partial_all_the_same(project: Project) -> None:
    project.commit()
    assert project.run("--scope", "chain", "--scope", "control").ret == 0
    verdict = project.report()["verdict"]
    assert (verdict["status"], verdict["green_scopes"], verdict["not_selected"]) == ("PARTIAL", ["chain", "control"], 1)
    assert validate_run(project.runs()[-1]) == []


def test_the_plugin_costs_nothing_elsewhere() -> None:
    code = "import sys, rlk.acceptance.plugin; print(sorted({'torch', 'pydantic', 'numpy', 'jinja2'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
