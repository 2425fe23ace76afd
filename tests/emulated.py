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
    """The source's first file below ``driver``, a .cpp beside this one, built in ``folder`` with (text, other) changed in it."""
    changed, library = folder / "source.cu.h", folder / "emulated.so"
    code = source.files[0].read_text()
    for text, other in changes:
        assert text in code
        code = code.replace(text, other)
    changed.write_text(code)
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-fPIC", "-shared", f"-I{HERE}", f'-DSOURCE="{changed}"']
    given = [f"-D{name}={value}" for name, value in definitions.items()]
    subprocess.run([os.environ.get("CXX", "g++"), *flags, *given, str(HERE / driver), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))
