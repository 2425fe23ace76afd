"""Runs that several cells read: each is made at most once, and one that failed fails every cell that needs it with the same reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Once:
    """Results by name, in the order in which they were made."""

    def __init__(self) -> None:
        self._done: dict[str, Any] = {}

    def __call__(self, name: str, make: Callable[[], T]) -> T:
        """The result called ``name``; ``make`` runs on the first call only, and its exception is raised again on every later one."""
        if name not in self._done:
            try:
                self._done[name] = make()
            except Exception as error:
                self._done[name] = error
        done = self._done[name]
        if isinstance(done, Exception):
            raise done
        result: T = done
        return result

    def __contains__(self, name: str) -> bool:
        """Whether :meth:`__call__` has been asked for ``name``."""
        return name in self._done

    def results(self) -> list[Any]:
        """What was made and did not fail."""
        return [done for done in self._done.values() if not isinstance(done, Exception)]
