"""Which sources produced a result: commit, dirty state and a digest of every tracked file, from git or from a verified manifest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Collection, Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

MANIFEST = "rlk-manifest.json"
SOURCE_SUFFIXES = (".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".hip", ".toml", ".ini", ".cfg", ".pth", ".so")
"""Files that can change a result even where git is told to ignore them; Python prefers a .so to the .py beside it."""


class Manifest(BaseModel):
    """What a copied tree without ``.git`` carries: commit, dirty state, path → SHA-256 of every tracked file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha: str
    dirty: bool
    files: dict[str, str]


class Provenance(BaseModel):
    """sha: commit, "" if unknown. dirty_files: paths that differ from it, untracked ones and ignored sources included (50 at most).

    tree_digest: over every tracked file as it is on disk. problem: why this provenance cannot support a PASS, "" if it can.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    sha: str
    dirty: bool
    dirty_files: tuple[str, ...] = ()
    tree_digest: str
    problem: str = ""


def read_provenance(root: Path) -> Provenance:
    """Provenance of the checkout at ``root``. Never raises: what cannot be known becomes a ``problem``."""
    if (root / ".git").exists():
        return _from_git(root)
    if (root / MANIFEST).exists():
        return _from_manifest(root)
    return _unknown("", f"no git checkout and no {MANIFEST} in {root.name}: the commit is unknown")


def write_manifest(root: Path, target: Path) -> Manifest:
    """Write the manifest of the git checkout at ``root``, for a copy that will travel without ``.git``."""
    seen = _from_git(root)
    if seen.problem:
        raise RuntimeError(seen.problem)
    files = [entry[2:] for entry in git(root, "ls-files", "-v", "-z")]
    manifest = Manifest(sha=seen.sha, dirty=seen.dirty, files={p: _digest(root / p) for p in files})
    target.write_text(json.dumps(manifest.model_dump(), indent=1, sort_keys=True))
    return manifest


def _from_git(root: Path) -> Provenance:
    try:
        options = ("--branch", "--untracked-files=all", "--no-renames", "--ignore-submodules=none")
        status = git(root, "status", "--porcelain=v2", "-z", *options)
        tagged = git(root, "ls-files", "-v", "-z")
        files = [entry[2:] for entry in tagged]
        others = git(root, "ls-files", "--others", "-z", "--", ":(glob)*", *_tops(files))
    except (OSError, subprocess.CalledProcessError) as error:
        why = str(getattr(error, "stderr", "") or error).strip().splitlines()
        return _unknown("git", f"git cannot tell the commit: {why[0] if why else 'no answer'}")
    sha = next((entry.split()[2] for entry in status if entry.startswith("# branch.oid ")), "")
    if not re.fullmatch(r"[0-9a-f]{40,64}", sha):
        return _unknown("git", "the checkout has no commit yet: commit first")
    dirty = {_path(entry) for entry in status if not entry.startswith("#")}
    dirty |= {entry[2:] for entry in tagged if entry[0] != "H"}  # told to git as unchanged, whatever they hold
    dirty |= set(_sources(root, others))
    return Provenance(
        source="git", sha=sha, dirty=bool(dirty), dirty_files=tuple(sorted(dirty)[:50]), tree_digest=_tree_digest(root, files)
    )


def _from_manifest(root: Path) -> Provenance:
    try:
        manifest = Manifest.model_validate_json((root / MANIFEST).read_bytes())
    except ValidationError as error:
        return _unknown("manifest", f"{MANIFEST} is not a manifest: {str(error).splitlines()[0]}")
    if not manifest.sha or not manifest.files:
        return _unknown("manifest", f"{MANIFEST} names no commit or no file: write it with the checkout")
    wrong = [path for path, digest in manifest.files.items() if _digest(root / path) != digest]
    wrong += sorted(_strangers(root, manifest.files))
    return Provenance(
        source="manifest",
        sha=manifest.sha,
        dirty=manifest.dirty or bool(wrong),
        dirty_files=tuple(wrong[:50]),
        tree_digest=_tree_digest(root, sorted(manifest.files)),
        problem=f"{len(wrong)} files differ from {MANIFEST}, first {wrong[0]}" if wrong else "",
    )


def _unknown(source: str, problem: str) -> Provenance:
    return Provenance(source=source, sha="", dirty=False, tree_digest="", problem=problem)


def git(root: Path, *arguments: str) -> list[str]:
    """Output of a git command, cut at NUL. No variable or cache of the user's can point it elsewhere."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-c", "core.fsmonitor=false", *arguments]
    done = subprocess.run(command, cwd=root, env=env, check=True, capture_output=True, text=True, errors="surrogateescape")
    return [entry for entry in done.stdout.split("\0") if entry]


def _path(entry: str) -> str:
    """Path of a porcelain v2 entry: ``? path`` if untracked, after 8 fields if changed, after 10 if unmerged."""
    fields = {"?": 1, "!": 1, "1": 8, "u": 10}[entry[0]]
    return entry.split(" ", fields)[fields]


def _tops(files: Iterable[str]) -> list[str]:
    """Top-level names that hold tracked files, and their bytecode; environments and outputs beside them are no sources."""
    return sorted({"__pycache__", *(path.split("/")[0] for path in files)})


def _sources(root: Path, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if path.endswith(SOURCE_SUFFIXES) or (path.endswith(".pyc") and _is_believed(root / path))]


def _is_believed(bytecode: Path) -> bool:
    """Whether Python runs it without a look at its source: it stands for a module itself, or its flags say so (PEP 552)."""
    if bytecode.parent.name != "__pycache__":
        return True
    try:
        with bytecode.open("rb") as file:
            return file.read(8)[4:] == b"\1\0\0\0"
    except OSError:  # gone meanwhile, or not to be read
        return bytecode.exists()


def _strangers(root: Path, files: Collection[str]) -> set[str]:
    """Sources beside those of a manifest."""
    folders = [root / top for top in _tops(files) if not (root / top).is_symlink()]
    beside = [*root.iterdir(), *(path for folder in folders for path in folder.rglob("*"))]
    return set(_sources(root, (str(path.relative_to(root)) for path in beside))) - set(files)


def _tree_digest(root: Path, files: list[str]) -> str:
    sha = hashlib.sha256()
    for path in files:
        sha.update(f"{path}\0{_digest(root / path)}\n".encode())
    return sha.hexdigest()


def _digest(path: Path) -> str:
    """SHA-256 of a file's bytes, of a link's target, or a word for a missing one."""
    if path.is_symlink():
        return hashlib.sha256(str(path.readlink()).encode()).hexdigest()
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "absent"
