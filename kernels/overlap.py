"""Launches that begin while the one before them ends (programmatic dependent launch), on Hopper.

Inside :func:`overlapped` a kernel that knows how may be on the card before its predecessor is done: it tells its own successor to come as
soon as all its blocks have begun, reads what no launch inside the context writes (weights), waits, and only then reads or writes anything
else. Every block of such a kernel waits, so that the end of one is the end of all before it. Other kernels begin when all before them are
done, as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from rlk.kernels.dispatch import hopper

_state = threading.local()


@contextmanager
def overlapped(device: torch.device) -> Iterator[None]:
    """Launches of this thread overlap inside, on a card that can. Nothing inside may write a weight."""
    before = overlaps()
    _state.on = hopper(device)
    try:
        yield
    finally:
        _state.on = before


def overlaps() -> bool:
    """Whether launches overlap now."""
    return getattr(_state, "on", False)


def constants() -> dict[str, bool]:
    """Of a Triton launch whose kernel has EARLY: whether it tells and waits, and the option that it is launched with."""
    return {"EARLY": True, "launch_pdl": True} if overlaps() else {"EARLY": False}
