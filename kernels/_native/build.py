"""Compile-once loader for the CPU backend.

A library is cached under a hash of its sources, the shared headers, the flags, the compiler and the CPU's features, so that no
other checkout's or machine's build can be loaded. Flags keep the contract: no contraction, no reassociation, no flush to zero.
-fno-trapping-math changes no value, only whether a select may become a vector blend (exp_ runs about four times faster).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
from pathlib import Path

import torch
from filelock import FileLock

from rlk.kernels.dispatch import record

HERE = Path(__file__).parent
FLAGS = (
    "-std=c++17",
    "-O3",
    "-march=native",
    "-ffp-contract=off",
    "-fno-fast-math",
    "-fno-trapping-math",
    "-fopenmp",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Werror=return-type",
)

Argument = torch.Tensor | int | float | None


class NativeBuildError(RuntimeError):
    """The compiler is missing or refused a source; the message carries its first error."""


def cache_root() -> Path:
    """Directory of compiled libraries: $RLK_CACHE_DIR, else ~/.cache/rlk."""
    return Path(os.environ.get("RLK_CACHE_DIR") or Path.home() / ".cache" / "rlk") / "native"


@functools.cache
def _toolchain() -> str:
    compiler = os.environ.get("CXX", "g++")
    try:
        version = subprocess.run([compiler, "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError) as error:
        raise NativeBuildError(f"no C++ compiler {compiler!r}: install g++ or set CXX") from error
    features = ""
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{version}|{platform.machine()}|{features}"


class NativeLibrary:
    """One operator's C++ source as a callable library.

    ``kernel_id`` is ``cpu:<op>:<first 12 hex digits of the hash>``; the hash covers everything that can change the machine code.
    """

    def __init__(self, op: str, source: Path) -> None:
        self.op = op
        self.source = source

    @functools.cached_property
    def digest(self) -> str:
        sha = hashlib.sha256()
        for path in (self.source, *sorted(HERE.glob("*.h"))):
            sha.update(path.read_bytes())
        sha.update("|".join((*FLAGS, _toolchain())).encode())
        return sha.hexdigest()

    @property
    def kernel_id(self) -> str:
        return f"cpu:{self.op}:{self.digest[:12]}"

    @functools.cached_property
    def _library(self) -> ctypes.CDLL:
        target = cache_root() / f"{self.op}-{self.digest[:32]}.so"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{target}.lock"):
                if not target.exists():
                    self._build(target)
        return ctypes.CDLL(str(target))

    def _build(self, target: Path) -> None:
        partial = target.with_suffix(f".{os.getpid()}.tmp")
        command = [os.environ.get("CXX", "g++"), *FLAGS, f"-I{HERE}", str(self.source), "-o", str(partial)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise NativeBuildError(f"{self.source.name} does not compile: {done.stderr.strip()[:2000]}")
        partial.rename(target)

    def call(self, function: str, *arguments: Argument, op: str | None = None) -> None:
        """Run ``function`` and record ``op`` (default: the library's own) as run. Tensors must be contiguous CPU tensors.

        int → int64_t, float → float, Tensor → data pointer, None → null pointer.
        """
        entry = getattr(self._library, function)
        entry.restype = None
        entry(*[_as_c(value, function) for value in arguments])
        record(op or self.op, "cpu", self.kernel_id)


def _as_c(value: Argument, function: str) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or not value.is_contiguous():
            raise ValueError(f"{function}: needs contiguous CPU tensors, got {tuple(value.shape)} {value.dtype} on {value.device}")
        return ctypes.c_void_p(value.data_ptr())
    return ctypes.c_float(value) if isinstance(value, float) else ctypes.c_int64(value)
