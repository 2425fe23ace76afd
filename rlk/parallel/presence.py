"""Who is still there: finds the rank whose loss broke a collective, so that every survivor ends with the same name.

Each rank keeps a listening socket that nobody ever serves; the kernel closes it with the process, so a refused connection means that
the process is gone. The first survivor to look writes its verdict into the store before it ends; whoever looks later, when that survivor
may be gone too, reads the verdict instead of guessing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import torch.distributed as dist

_VERDICT = "rlk/verdict"


class Presence:
    """One rank's listening socket and the addresses of all others.

    store: shared by all ranks and served by rank 0's process. label: how this rank is named. grace: seconds in which ranks that are
    alive must answer after a time-out, and for which rank 0 keeps the store open for the others.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, label: str, *, host: str, grace: float) -> None:
        self._store, self._rank, self._size, self._grace = store, rank, size, grace
        self._socket = socket.create_server((host, 0), backlog=4 * size)
        self._host = host
        store.set(f"rlk/presence/{rank}", f"{self._socket.getsockname()[1]} {label}")
        entries = [store.get(f"rlk/presence/{r}").decode().split(" ", 1) for r in range(size)]
        self._ports = [int(port) for port, _ in entries]
        self.labels = [name for _, name in entries]

    def verdict(self, symptom: str) -> str:
        """One line that names what broke the collective; the same on every surviving rank. symptom: the transport's own message."""
        gone = self._gone()
        if 0 in gone:
            return self._named(gone)  # the store is gone with rank 0
        try:
            return self._agreed(gone, symptom)
        except RuntimeError:
            return self._named(self._gone() or [0])

    def close(self) -> None:
        """Stop being present."""
        self._socket.close()

    def _agreed(self, gone: Sequence[int], symptom: str) -> str:
        self._store.set(f"rlk/answer/{self._rank}", "here")
        deadline = time.monotonic() + self._grace
        while not gone and not self._store.check([_VERDICT]) and time.monotonic() < deadline:
            time.sleep(0.02)
            gone = self._gone()
        found = self._named(gone) if gone else self._unanswered(symptom)
        text = self._store.compare_set(_VERDICT, "", found).decode()
        self._store.set(f"rlk/read/{self._rank}", "read")
        if self._rank == 0:
            self._wait_for_readers(deadline + self._grace)
        return text

    def _unanswered(self, symptom: str) -> str:
        silent = [r for r in range(self._size) if not self._store.check([f"rlk/answer/{r}"])]
        if not silent:
            return f"no rank is gone, but they wait for different collectives ({symptom}): give every rank the same calls in the same order"
        return f"{self._list(silent)} does not answer: look why it hangs, and start the job again"

    def _wait_for_readers(self, deadline: float) -> None:
        others = range(1, self._size)
        while time.monotonic() < deadline:
            gone = self._gone()
            if all(r in gone or self._store.check([f"rlk/read/{r}"]) for r in others):
                return
            time.sleep(0.02)

    def _gone(self) -> list[int]:
        return [r for r in range(self._size) if r != self._rank and not self._listens(r)]

    def _listens(self, rank: int) -> bool:
        try:
            socket.create_connection((self._host, self._ports[rank]), timeout=5).close()
        except OSError:
            return False
        return True

    def _named(self, gone: Sequence[int]) -> str:
        return f"{self._list(gone)} is gone: its process died or left before the others; read its log, and start the job again"

    def _list(self, ranks: Sequence[int]) -> str:
        return ", ".join(self.labels[r] for r in ranks)
