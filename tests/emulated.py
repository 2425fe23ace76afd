"""Builds a Hopper kernel's own source for a processor, where its threads are emulated one by one (``emulated_cuda.h``)."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from rlk.kernels._native.cuda import CudaSource

HERE = Path(__file__).parent


def build(folder: Path, source: CudaSource, driver: str, definitions: Mapping[str, int], *changes: tuple[str, str]) -> ctypes.CDLL:
    """The source below ``driver``, a .cpp beside this one, built in ``folder`` with (text, other) changed in it and what it includes."""
    library, parts = folder / "emulated.so", {path.name: path.read_text() for path in source.files if path.suffix == ".h"}
    for text, other in changes:
        assert any(text in code for code in parts.values())
        parts = {name: code.replace(text, other) for name, code in parts.items()}
    for name, code in parts.items():
        (folder / name).write_text(code)
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared", f"-I{HERE}", f'-DSOURCE="{folder / source.files[0].name}"']
    given = [f"-D{name}={value}" for name, value in definitions.items()]
    subprocess.run([os.environ.get("CXX", "g++"), *flags, *given, str(HERE / driver), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
