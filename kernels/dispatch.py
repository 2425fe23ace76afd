"""Backend choice and read-back: which implementation of an operator ran in this process.

There is no fallback. A backend that cannot run here raises; the one that ran reports itself with the hash of its own source.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

BACKENDS = ("cpu", "triton", "vendor")
Backends = Mapping[str, Callable[..., Any]]


class BackendUnavailable(RuntimeError):
    """The requested backend has no implementation of the operator, or cannot run on the tensor's device."""


@dataclass(frozen=True)
class Ran:
    """One (operator, backend, kernel id) that ran in this process, and how often."""

    op: str
    backend: str
    kernel_id: str
    calls: int


_AS_IT_IS: AbstractContextManager[object] = nullcontext()
_lock = threading.Lock()
_ran: dict[tuple[str, str, str], int] = {}


def declared(device: torch.device) -> str:
    """The backend that operators run on for tensors of ``device`` unless another is asked for: cpu: "cpu", cuda: "triton"."""
    return "cpu" if device.type == "cpu" else "triton"


@functools.cache
def hopper(device: torch.device) -> bool:
    """Whether ``device`` is a card of sm_90, for which some operators have kernels of their own in the table of "triton"."""
    return device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) == (9, 0)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make the card ``device`` torch's current one; the host loses no time where it is that already, or no card."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(device)


def select(op: str, table: Backends, backend: str | None, device: torch.device) -> Callable[..., Any]:
    """Return the implementation of ``op``; ``backend=None`` means the :func:`declared` one of the device."""
    name = backend or declared(device)
    if name not in BACKENDS:
        raise BackendUnavailable(f"{op}: unknown backend {name!r}, choose one of {', '.join(BACKENDS)}")
    if name not in table:
        raise BackendUnavailable(f"{op}: backend {name!r} is not implemented, available: {', '.join(table)}")
    if (name == "cpu") != (device.type == "cpu"):
        raise BackendUnavailable(f"{op}: backend {name!r} cannot run on device {device}")
    return table[name]


def record(op: str, backend: str, kernel_id: str) -> None:
    """Called by an implementation each time it runs, never by the dispatcher."""
    with _lock:
        key = (op, backend, kernel_id)
        _ran[key] = _ran.get(key, 0) + 1


def readback() -> list[Ran]:
    """Every (operator, backend, kernel id) that ran since the last reset, sorted by operator."""
    with _lock:
        return [Ran(*key, calls) for key, calls in sorted(_ran.items())]


def reset_readback() -> None:
    """Forget what ran."""
    with _lock:
        _ran.clear()
