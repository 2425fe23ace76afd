"""Launches Triton kernels under fixed compiler options, names them by their source and records what ran.

Nothing here imports Triton, so that kernel ids can be computed and tables of backends built on any machine.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlk.kernels.dispatch import BackendUnavailable, current, record

HERE = Path(__file__).parent

# No product is fused into a sum unless written, no subnormal is flushed. On AMD one matrix instruction for every tile, 16 products deep:
# the 32x32 one adds 8 at a time, and kpack=2 would deal other k's into a group.
OPTIONS: dict[str, dict[str, Any]] = {
    "cuda": {"enable_fp_fusion": False, "enable_reflect_ftz": False},
    "hip": {"enable_fp_fusion": False, "allow_flush_denorm": False, "matrix_instr_nonkdim": 16, "kpack": 1},
}


@dataclass(frozen=True)
class Launch:
    """One kernel launch as it was asked for: the jitted function, its run-time arguments, its constants, warps and pipeline stages."""

    operator: str
    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]


_recorded: list[Launch] | None = None
_platform: str | None = None


@contextmanager
def recorded(platform: str) -> Iterator[list[Launch]]:
    """Collect launches for ``platform`` ("cuda" or "hip") instead of running them; arguments may be meta tensors."""
    global _recorded, _platform
    before = _recorded, _platform
    _recorded, _platform = [], platform
    try:
        yield _recorded
    finally:
        _recorded, _platform = before


def platform() -> str:
    """ "hip" under ROCm, else "cuda"; inside :func:`recorded` the platform that is recorded for."""
    return _platform or ("hip" if torch.version.hip else "cuda")


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a card (132, an H100's, where there is none). Only how work is dealt out depends on it, never a byte."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


class TritonSource:
    """The Triton source of one operator, ``kernels/<op>/triton*.py``.

    ``kernel_id`` is ``triton:<op>:<first 12 hex digits of the hash>``; the hash covers that source, this package's and the options.
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self.files = tuple(sorted((HERE.parent / op).glob("triton*.py")))

    @functools.cached_property
    def kernel_id(self) -> str:
        sha = hashlib.sha256(repr(OPTIONS).encode())
        shared = [path for path in sorted(HERE.glob("*.py")) if path.name != "aot.py"]
        for path in (*self.files, *shared):
            sha.update(path.read_bytes())
        return f"triton:{self.op}:{sha.hexdigest()[:12]}"

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, op: str | tuple[str, ...] | None, warps: int = 4, stages: int = 1,
        **constants: Any,
    ) -> None:  # fmt: skip
        """Run ``kernel`` over ``grid`` and record ``op``, or each operator that it fuses, as run.

        None: a part of a launch that is recorded under its own name.
        """
        options = {"num_warps": warps, "num_stages": stages, **OPTIONS[platform()]}
        if _recorded is not None:
            _recorded.append(Launch(self.op, kernel, arguments, constants, options))
            return
        tensor = next(a for a in arguments if isinstance(a, torch.Tensor))
        with current(tensor.device):
            kernel[grid](*arguments, **constants, **options)
        for ran in (op,) if isinstance(op, str) else op or ():
            record(ran, "triton", self.kernel_id)


def from_triton(op: str, function: str) -> Callable[..., Any]:
    """``function`` of ``kernels/<op>/triton.py``, imported when first called: until then Triton need not be installed."""

    def run(*arguments: Any) -> Any:
        try:
            module = importlib.import_module(f"rlk.kernels.{op}.triton")
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise BackendUnavailable(
                f"{op}: backend 'triton' needs the triton package: install rlk with the extra of this platform"
            ) from error
        return getattr(module, function)(*arguments)

    return run
