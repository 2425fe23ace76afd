"""What was certified of a vendor's library, kept per card, driver and library version, so that a process starts where the last ended."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock

from rlk.kernels._native.build import cache_root


class VendorNotCertified(RuntimeError):
    """The vendor's library adds in another order than the contract, or was not certified before a graph capture."""


def card(device: int) -> dict[str, str]:
    """Name and driver of a card."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()[0]
    return {"card": torch.cuda.get_device_name(device), "driver": driver}


class Certificates:
    """Problems of one operator that its vendor library solves in the contract's order.

    where: from a device to everything that a certificate holds for (card, driver, library, sources). One JSON file for each such set,
    ``vendor/<operator>-<hash>.json`` beside the compiled libraries.
    """

    def __init__(self, operator: str, where: Callable[[int], dict[str, str]]) -> None:
        self._operator, self._where = operator, where
        self._devices: dict[int, tuple[dict[str, str], set[str]]] = {}

    def known(self, device: int) -> set[str]:
        """Certified problems, by name; the file is read once per process."""
        return self._on(device)[1]

    def keep(self, device: int, problem: str) -> None:
        """Add a problem, for this process and the next ones."""
        where, problems = self._on(device)
        problems.add(problem)
        file = self._file(where)
        file.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            kept = json.loads(file.read_text()) if file.exists() else {**where, "certified": []}
            kept["certified"] = sorted({*kept["certified"], problem})
            partial = file.with_suffix(f".{os.getpid()}.tmp")
            partial.write_text(json.dumps(kept, indent=1) + "\n")
            partial.rename(file)

    def forget(self) -> None:
        """Read the files again, as a new process does."""
        self._devices.clear()

    def _on(self, device: int) -> tuple[dict[str, str], set[str]]:
        if device not in self._devices:
            where = self._where(device)
            file = self._file(where)
            self._devices[device] = where, set(json.loads(file.read_text())["certified"]) if file.exists() else set()
        return self._devices[device]

    def _file(self, where: dict[str, str]) -> Path:
        named = hashlib.sha256(json.dumps(where, sort_keys=True).encode()).hexdigest()[:16]
        return cache_root().with_name("vendor") / f"{self._operator}-{named}.json"
