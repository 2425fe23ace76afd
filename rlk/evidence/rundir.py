"""Append-only run directories: created once, files written once, lines appended; never overwritten."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

COMPLETE, FAILED = "COMPLETE", "FAILED"


class RunDirectoryError(RuntimeError):
    """The directory exists, a file exists, or the directory is sealed; one line with the remedy."""


def new_run_id(now: datetime | None = None) -> str:
    """Sortable id: UTC time and four random hex digits."""
    return f"{(now or datetime.now(UTC)):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"


class RunDirectory:
    """A directory that holds one run. Open an existing one with the constructor, make a new one with :meth:`create`."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise RunDirectoryError(f"no run directory {path}: check the path")
        self.path = path

    @classmethod
    def create(cls, path: Path) -> RunDirectory:
        """Make ``path``; refuses an existing one."""
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.mkdir()
        except FileExistsError:
            raise RunDirectoryError(f"run directory {path} exists: choose another --run-id, runs are never overwritten") from None
        return cls(path)

    @property
    def sealed(self) -> bool:
        """Whether ``rlk validate --seal`` accepted this run."""
        return (self.path / COMPLETE).exists()

    def write_text(self, name: str, text: str) -> Path:
        """Write a new file; refuses an existing one."""
        target = self._writable(name)
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(text)
        except FileExistsError:
            raise RunDirectoryError(f"{target} exists: files of a run are never overwritten") from None
        return target

    def write_json(self, name: str, value: Any) -> Path:
        """Write a new JSON file."""
        return self.write_text(name, json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n")

    def append_json(self, name: str, *values: Any) -> None:
        """Append one line of JSON for each value and flush them to disk together."""
        with self._writable(name).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(value, sort_keys=True, allow_nan=False) + "\n" for value in values)
            file.flush()
            os.fsync(file.fileno())

    def mark_failed(self, reason: str) -> None:
        """Say why the run did not end well; the first reason stays."""
        if not (self.path / FAILED).exists():
            self.write_text(FAILED, reason.rstrip() + "\n")

    def digests(self) -> dict[str, str]:
        """SHA-256 of every file but the seal, by relative path; weights have gigabytes, so files are read in pieces, several at once."""
        files = sorted(p for p in self.path.rglob("*") if p.is_file() and p.name != COMPLETE)
        with ThreadPoolExecutor() as pool:
            return {str(p.relative_to(self.path)): found for p, found in zip(files, pool.map(_digest, files))}

    def seal(self) -> Path:
        """Write ``COMPLETE`` with the digest of every file; nothing can be written afterwards."""
        return self.write_json(COMPLETE, {"files": self.digests()})

    def _writable(self, name: str) -> Path:
        target = (self.path / name).resolve()
        if self.path.resolve() not in target.parents:
            raise RunDirectoryError(f"{name} lies outside the run directory")
        if self.sealed:
            raise RunDirectoryError(f"{self.path} is sealed: start another run")
        target.parent.mkdir(parents=True, exist_ok=True)
        return target


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
