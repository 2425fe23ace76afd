"""Runs the acceptance suite of two revisions, each in a clean checkout with caches of its own, and compares what they leave.

Neither revision can see the other, an installed rlk, or what the other compiled: each gets a clone, a PYTHONPATH that begins with it and
holds no other rlk, and empty caches. What it imported is looked at before it runs, and once more in what it recorded.
"""

from __future__ import annotations

import json
import os
import pkgutil
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import rlk
from rlk.acceptance import judge
from rlk.acceptance.platforms import Platform
from rlk.acceptance.revision import ROLES, SEPARATED, RevisionRefused, compare_runs
from rlk.acceptance.revision_page import write_comparison
from rlk.contract.models import QWEN3_8B
from rlk.evidence.provenance import git, read_provenance
from rlk.evidence.rundir import RunDirectory, new_run_id
from rlk.evidence.schema import Report

OWN_OPTIONS = ("--baseline", "--candidate", "--artifacts")
SUITE = ("rlk/acceptance/plugin.py", "acceptance/conftest.py")
"""What a revision must have to be run."""
HIDDEN = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")
ORIGINS = """
import importlib.util, json, sys
specs = [importlib.util.find_spec(name) for name in sys.argv[1:]]
print(json.dumps([spec.origin or next(iter(spec.submodule_search_locations)) for spec in specs if spec]))
"""
VALIDATE = "from rlk.cli import main; main()"


@dataclass(frozen=True)
class Checkout:
    """One revision, alone: its role, commit, clone and environment."""

    role: str
    sha: str
    root: Path
    env: Mapping[str, str]

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run this interpreter in the checkout and keep what it says."""
        return subprocess.run([sys.executable, *arguments], cwd=self.root, env=self.env, capture_output=True, text=True)


def compare_revisions(
    root: Path, platform: Platform, baseline: str, candidate: str | None, arguments: Sequence[str], artifacts: Path | None
) -> int:
    """Run and compare two revisions of the git checkout at ``root``; returns the exit code of the comparison.

    arguments: pytest's own, as given; paths among them are relative to ``root``. candidate: None for HEAD. A run that ends without a report
    gives 1. Raises RevisionRefused for revisions that cannot be run, and for a run that is not that revision's.
    """
    shas = resolve(root, baseline, candidate)
    forwarded = list(_forwarded(arguments))
    base = (artifacts or root / "artifacts" / "refactor").absolute()
    target = RunDirectory.create(base / platform / shas[1] / f"{new_run_id()}-against-{shas[0][:12]}")
    with TemporaryDirectory(prefix="rlk-revision-") as scratch:
        checkouts = [check_out(role, root, sha, Path(scratch) / role) for role, sha in zip(ROLES, shas)]
        for checkout in checkouts:
            require_own_imports(checkout)
        runs = []
        for checkout in checkouts:
            run = run_suite(checkout, forwarded, target)
            if run is None:
                print(f"FAIL  the {checkout.role} reached no report: read {target.path / f'{checkout.role}.log'}", flush=True)
                return 1
            runs.append(run)
    revision = compare_runs(runs[0], runs[1], shlex.join(["pytest", *arguments]))
    page = write_comparison(revision, target)
    for reason in revision.reasons:
        print(reason)
    print(f"{revision.status}  {page}", flush=True)
    return judge.exit_code(revision)


def resolve(root: Path, baseline: str, candidate: str | None) -> tuple[str, str]:
    """Commits of both revisions. Raises RevisionRefused for a dirty or unknown checkout, an unknown revision, or one without the suite."""
    here = read_provenance(root)
    if here.source != "git" or here.problem:
        raise RevisionRefused(f"--baseline needs a git checkout ({here.problem or here.source}): compare two runs with `rlk compare`")
    if here.dirty:
        raise RevisionRefused(f"the checkout is dirty ({', '.join(here.dirty_files[:3])}): commit, revisions are compared as committed")
    return _commit(root, "--baseline", baseline), _commit(root, "--candidate", here.sha if candidate is None else candidate)


def _commit(root: Path, option: str, revision: str) -> str:
    try:
        sha = git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")[0].strip()
    except (IndexError, subprocess.CalledProcessError):
        raise RevisionRefused(f"{option} {revision!r} is no commit of this repository: `git fetch`, or name another") from None
    for path in SUITE:
        try:
            git(root, "cat-file", "-e", f"{sha}:{path}")
        except subprocess.CalledProcessError:
            raise RevisionRefused(f"{option} {revision!r} has no acceptance suite ({path}): name a later commit") from None
    return sha


def check_out(role: str, root: Path, sha: str, place: Path) -> Checkout:
    """A clone of ``root`` at ``sha`` below ``place``, with empty caches beside it. The pinned published weights, if there, are linked."""
    clone = place / "checkout"
    git(root, "clone", "--quiet", "--shared", "--no-checkout", str(root), str(clone))
    git(clone, "-c", "advice.detachedHead=false", "checkout", "--quiet", "--detach", sha)
    weights = Path("artifacts") / "models" / QWEN3_8B.name
    if (root / weights).is_dir():
        (clone / weights).parent.mkdir(parents=True, exist_ok=True)
        (clone / weights).symlink_to((root / weights).resolve())
    env = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    env |= {name: str(place / name.lower()) for name in SEPARATED}
    others = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and not (Path(p) / "rlk").exists()]
    return Checkout(role, sha, clone, env | {"PYTHONPATH": os.pathsep.join([str(clone), *others])})


def require_own_imports(checkout: Checkout) -> None:
    """Raises RevisionRefused unless the checkout imports rlk, and whatever part of it this process has, from itself.

    A part that the checkout lacks must not be found at all: an editable install would lend its own.
    """
    names = ["rlk", *(f"rlk.{part.name}" for part in pkgutil.iter_modules(rlk.__path__))]
    done = checkout.call("-c", ORIGINS, *names)
    if done.returncode:
        raise RevisionRefused(f"the {checkout.role} cannot be imported: {_last(done.stderr)}")
    for path in json.loads(done.stdout):
        if not Path(path).resolve().is_relative_to(checkout.root.resolve()):
            raise RevisionRefused(f"the {checkout.role} imports {path}, not its own checkout: uninstall that rlk, or mend the interpreter")


def require_own_run(checkout: Checkout, run: Path) -> None:
    """Raises RevisionRefused unless the run says that it is of this commit, clean, and imported nothing of another checkout."""
    report = Report.model_validate_json((run / "report.json").read_bytes())
    if (report.provenance.sha, report.provenance.dirty) != (checkout.sha, False):
        raise RevisionRefused(f"the {checkout.role}'s run is of commit {report.provenance.sha or 'unknown'}, or dirty: run it again")
    paths = report.environment.get("import_paths")
    for name in ("rlk", "rlk.kernels"):
        path = paths.get(name) if isinstance(paths, dict) else None
        if not isinstance(path, str) or not path or Path(path).is_absolute():
            raise RevisionRefused(f"the {checkout.role}'s run imported {name} from {path or 'nowhere known'}, not from its own checkout")


def run_suite(checkout: Checkout, forwarded: Sequence[str], target: RunDirectory) -> Path | None:
    """One session of a revision; seals and returns its run directory, None if it ended without a report.

    Raises RevisionRefused where no session started, for one that ended otherwise than its report says, for a run that is not this
    revision's, and for one that cannot be sealed.
    """
    log, artifacts = target.path / f"{checkout.role}.log", target.path / checkout.role
    print(f"{checkout.role} {checkout.sha[:12]}: runs, its output goes to {log}", flush=True)
    command = [sys.executable, "-m", "pytest", *forwarded, "--artifacts", str(artifacts)]
    with log.open("xb") as file:
        code = subprocess.run(command, cwd=checkout.root, env=checkout.env, stdout=file, stderr=subprocess.STDOUT).returncode
    print(f"{checkout.role} {checkout.sha[:12]}: ended with exit code {code}", flush=True)
    if code in (2, 4):
        raise RevisionRefused(f"the {checkout.role} cannot be run so: {_last(log.read_text(errors='replace'))}")
    found = sorted(artifacts.glob("*/*/*/report.json"))
    if len(found) != 1:
        return None
    run = found[0].parent
    due = judge.exit_code(Report.model_validate_json(found[0].read_bytes()).verdict)
    if code != due:
        raise RevisionRefused(f"the {checkout.role} ended with exit code {code}, its report calls for {due}: read {log}, run it again")
    require_own_run(checkout, run)
    sealed = checkout.call("-c", VALIDATE, "validate", str(run), "--seal")
    if sealed.returncode:
        raise RevisionRefused(f"the {checkout.role}'s run cannot be sealed: {_last(sealed.stdout + sealed.stderr)}")
    return run


def _forwarded(arguments: Sequence[str]) -> Iterator[str]:
    """The arguments without those of the comparison itself."""
    given = iter(arguments)
    for argument in given:
        name, separator, _ = argument.partition("=")
        if name not in OWN_OPTIONS:
            yield argument
        elif not separator:
            next(given, None)


def _last(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it said nothing"
