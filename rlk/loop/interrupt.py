"""Ctrl-C that cannot get lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def remembered_interrupts() -> Iterator[Callable[[], None]]:
    """Inside, SIGINT raises KeyboardInterrupt as always; the yielded check raises it again if that one was lost.

    An exception raised by a signal handler is dropped where it arrives in a callback whose exceptions nobody sees (a finalizer, a C
    extension's callback). Outside the main thread, which alone receives signals, the check does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    seen = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen = True
        raise KeyboardInterrupt

    def check() -> None:
        if seen:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)
