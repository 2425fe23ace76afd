"""`rlk doctor`: what this machine must have before a run, each with the remedy where it is missing. Starts nothing."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

import psutil
import torch
from packaging.requirements import Requirement

from rlk.contract.numerics import ContractError
from rlk.loop.labels import PrepareError
from rlk.loop.plan import LOOPBACK, PlanError, resolve_checkpoint
from rlk.loop.profile import Device, Profile
from rlk.model.config import CheckpointError

GIB = 1 << 30
MEMORY_GIB = 4
"""Two engines with the tiny model, Ray and the controller take 2.5 GiB."""
SHARED_MEMORY_GIB = 0.25
"""Twice Ray's object store."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class Finding:
    """One line of the doctor. remedy: "" if all is well."""

    name: str
    found: str
    remedy: str = ""

    @property
    def ok(self) -> bool:
        """Nothing to do."""
        return not self.remedy


def examine(profile: Profile) -> list[Finding]:
    """Every check, in a fixed order; the checkpoint and the port are those of the profile."""
    return [
        _python(),
        _compiler(),
        *packages(profile.device),
        *_strangers(),
        _torch_build(profile.device),
        _subnormals(),
        *_memory(),
        loopback(profile.port),
        _model(profile),
    ]


def _python() -> Finding:
    found = sys.version.split()[0]
    return Finding("python", found, "" if sys.version_info >= (3, 11) else "use Python 3.11 or newer")


def _compiler() -> Finding:
    compiler = os.environ.get("CXX", "g++")
    try:
        ran = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return Finding("compiler", f"no {compiler}", "install g++, or set CXX to a C++17 compiler")
    return Finding("compiler", ran.stdout.splitlines()[0])


def packages(device: Device) -> Iterator[Finding]:
    """Installed versions against the requirements of the package itself and of the device's extra."""
    try:
        texts = requires("rlk") or ()
    except PackageNotFoundError:
        yield Finding("rlk", "not installed", f"pip install -e '.[{device}]'")
        return
    for text in texts:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": device}):
            continue
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            yield Finding(requirement.name, "absent", f"pip install '{requirement.name}{requirement.specifier}'")
            continue
        wanted = requirement.specifier.contains(found, prereleases=True)
        yield Finding(requirement.name, found, "" if wanted else f"pip install '{requirement.name}{requirement.specifier}'")


def _strangers() -> Iterator[Finding]:
    for name in UNWANTED:
        try:
            found = version(name)
        except PackageNotFoundError:
            yield Finding(name, "absent")
            continue
        yield Finding(name, found, f"pip uninstall {name}: built for another torch, it breaks every import of transformers")


def _torch_build(device: Device) -> Finding:
    kind = "cuda" if torch.version.cuda else "rocm" if torch.version.hip else "cpu"
    return Finding("torch build", kind, "" if kind == device else f"install torch's build for {device}: the engines of this device need it")


def _subnormals() -> Finding:
    """Halve the smallest normal fp32 number, in enough elements to reach every thread."""
    halved = torch.full((1 << 20,), torch.finfo(torch.float32).tiny) * 0.5
    kept = bool((halved != 0).all())
    return Finding("subnormals", "kept" if kept else "flushed to zero", "" if kept else "find what sets flush-to-zero in this process")


def _memory() -> Iterator[Finding]:
    free = psutil.virtual_memory().available / GIB
    yield Finding("free memory", f"{free:.1f} GiB", "" if free >= MEMORY_GIB else f"free at least {MEMORY_GIB} GiB")
    shared = shutil.disk_usage("/dev/shm").free / GIB if os.path.isdir("/dev/shm") else 0.0
    enough = shared >= SHARED_MEMORY_GIB
    yield Finding("/dev/shm", f"{shared:.2f} GiB free", "" if enough else f"give it {SHARED_MEMORY_GIB} GiB (containers: --shm-size)")


def loopback(port: int) -> Finding:
    name = f"port {port}" if port else "a free port"
    with socket.socket() as listener:
        try:
            listener.bind((LOOPBACK, port))
            listener.listen()
            socket.create_connection(listener.getsockname(), timeout=5).close()
        except OSError as error:
            return Finding("loopback", f"{name}: {error.strerror or error}", "choose another --port, or allow connections on 127.0.0.1")
    return Finding("loopback", f"{name} opens and answers")


def _model(profile: Profile) -> Finding:
    try:
        facts = resolve_checkpoint(profile.model)
    except (PlanError, CheckpointError, PrepareError, ContractError) as error:
        what, _, remedy = str(error).rpartition(": ")
        return Finding("checkpoint", what or str(error), remedy or "run `rlk prepare --tiny`")
    return Finding("checkpoint", f"{facts.path}, {facts.kind}, {facts.model_hash[:16]}…")
