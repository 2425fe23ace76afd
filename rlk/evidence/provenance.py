"""Which sources produced a result: commit, dirty state and a digest of every tracked file, from git or from a verified manifest."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

MANIFEST = "rlk-manifest.json"


class Manifest(BaseModel):
    """What a copied tree without ``.git`` carries: commit, dirty state, path → SHA-256 of every tracked file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha: str
    dirty: bool
    files: dict[str, str]


class Provenance(BaseModel):
    """sha: commit, "" if unknown. dirty_files: paths that differ from it. problem: why this provenance cannot support a PASS, "" if it can."""

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
    manifest = Manifest(sha=seen.sha, dirty=seen.dirty, files={p: _digest(root / p) for p in _tracked(root)})
    target.write_text(json.dumps(manifest.model_dump(), indent=1, sort_keys=True))
    return manifest


def _from_git(root: Path) -> Provenance:
    try:
        sha = _git(root, "rev-parse", "HEAD").strip()
        status = _git(root, "status", "--porcelain=v1", "-z", "--untracked-files=all")
        files = _tracked(root)
    except (OSError, subprocess.CalledProcessError) as error:
        why = str(getattr(error, "stderr", "") or error).strip().splitlines()
        return _unknown("git", f"git cannot tell the commit: {why[0] if why else 'no answer'}")
    dirty = tuple(entry[3:] for entry in status.split("\0") if len(entry) > 3)
    return Provenance(source="git", sha=sha, dirty=bool(dirty), dirty_files=dirty[:50], tree_digest=_tree_digest(root, files))


def _from_manifest(root: Path) -> Provenance:
    try:
        manifest = Manifest.model_validate_json((root / MANIFEST).read_bytes())
    except ValidationError as error:
        return _unknown("manifest", f"{MANIFEST} is not a manifest: {str(error).splitlines()[0]}")
    wrong = [path for path, digest in manifest.files.items() if _digest(root / path) != digest]
    problem = f"{len(wrong)} files differ from {MANIFEST}, first {wrong[0]}" if wrong else ""
    if manifest.dirty and not problem:
        problem = f"{MANIFEST} was written from a dirty checkout"
    return Provenance(
        source="manifest",
        sha=manifest.sha,
        dirty=manifest.dirty or bool(wrong),
        dirty_files=tuple(wrong[:50]),
        tree_digest=_tree_digest(root, sorted(manifest.files)),
        problem=problem,
    )


def _unknown(source: str, problem: str) -> Provenance:
    return Provenance(source=source, sha="", dirty=False, tree_digest="", problem=problem)


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout


def _tracked(root: Path) -> list[str]:
    return [p for p in _git(root, "ls-files", "-z").split("\0") if p]


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
