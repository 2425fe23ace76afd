#!/usr/bin/env python3
"""Sets up a fresh machine and runs one of the project's jobs. Needs Python 3.11 or newer, pip and g++, nothing else.

    python3 ci/run.py tests        lint, types and the tests
    python3 ci/run.py acceptance   the CPU acceptance matrix; the path of the report is printed last
    python3 ci/run.py ws1          its operator scope alone: 0 if every operator cell is green
    python3 ci/run.py ws1-chain    the operator scope and the chain of the model's intermediates

Arguments after the job go to pytest. The environment lives in .venv and is installed again only when a lock file changes.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOCKS = (ROOT / "ci/requirements/cpu-torch.txt", ROOT / "ci/requirements/cpu.txt")
STAMP = VENV / "rlk-lock.sha256"
PYTHON = VENV / "bin" / "python"


def tests(extra: list[str]) -> int:
    """Lint, types, tests; test files are dealt out whole, since the tests of one file share their engines."""
    code = 0
    for command in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        code = run([str(VENV / "bin" / command[0]), *command[1:]]) or code
    return run([str(PYTHON), "-m", "pytest", "tests", "-n", "2", "--dist", "loadfile", *extra]) or code


def acceptance(extra: list[str]) -> int:
    """The CPU acceptance matrix; pytest's own summary ends with the path of the report."""
    return run([str(PYTHON), "-m", "pytest", "-m", "cpu", "acceptance/", *extra])


def ws1(extra: list[str]) -> int:
    """The operator scope; fails unless all of its required cells are green."""
    return acceptance(["--scope", "ws1", *extra])


def ws1_chain(extra: list[str]) -> int:
    """The operator scope and the chain scope."""
    return acceptance(["--scope", "ws1", "--scope", "chain", *extra])


JOBS = {"tests": tests, "acceptance": acceptance, "ws1": ws1, "ws1-chain": ws1_chain}


def run(command: list[str]) -> int:
    """Run in the repository root with the environment's programs first; returns the exit code."""
    env = {**os.environ, "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}", "VIRTUAL_ENV": str(VENV)}
    env.pop("PYTHONPATH", None)
    print("+", shlex.join(command), flush=True)
    return subprocess.run(command, cwd=ROOT, env=env).returncode


def lock_digest() -> str:
    """SHA-256 over the lock files, the project file and the interpreter."""
    sha = hashlib.sha256(sys.version.encode())
    for path in (*LOCKS, ROOT / "pyproject.toml"):
        sha.update(path.read_bytes())
    return sha.hexdigest()


def set_up() -> None:
    """Create .venv and install the locks into it, unless exactly that was installed before."""
    digest = lock_digest()
    if PYTHON.exists() and STAMP.exists() and STAMP.read_text() == digest:
        return
    began = time.monotonic()
    shutil.rmtree(VENV, ignore_errors=True)
    step([sys.executable, "-m", "venv", str(VENV)], "cannot create the virtual environment (Debian and Ubuntu: install python3-venv)")
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", "-q"]
    for lock in LOCKS:
        step([*pip, "install", "--no-deps", "--retries", "2", "-r", str(lock)], f"cannot install {lock.relative_to(ROOT)}")
    step([*pip, "install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)], "cannot install rlk itself")
    STAMP.write_text(digest)
    print(f"installed {VENV} in {time.monotonic() - began:.0f} s", flush=True)


def step(command: list[str], failure: str) -> None:
    """Run one installation command; on failure end with the command and why."""
    print("+", shlex.join(command), flush=True)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if line.strip() and not line.startswith("WARNING")]
        why = next((line for line in errors if "ERROR" in line), errors[-1] if errors else f"exit code {done.returncode}")
        print(done.stdout, file=sys.stderr)
        sys.exit(f"ci/run.py: {failure}\n  command: {shlex.join(command)}\n  why: {why}")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in JOBS:
        print(f"ci/run.py: name a job: {', '.join(JOBS)}", file=sys.stderr)
        return 2
    if sys.version_info < (3, 11):  # noqa: UP036 (an older Python reads this file too)
        print(f"ci/run.py: needs Python 3.11 or newer, this is {sys.version.split()[0]}", file=sys.stderr)
        return 2
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        print(f"ci/run.py: no C++ compiler {compiler!r}: install g++ or set CXX", file=sys.stderr)
        return 2
    set_up()
    return JOBS[arguments[0]](arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
