"""How long the parts of a piece of work take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Seconds by part, of the last time that each ran to its end.

    device: a card is waited for at the end of a part, so that what it still computes is counted where it was begun.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._card = device if device is not None and device.type == "cuda" else None

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        if self._card is not None:
            torch.cuda.synchronize(self._card)
        self.seconds[name] = time.monotonic() - began
