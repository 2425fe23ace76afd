"""Who is still there: finds the rank whose loss broke a collective, so that every survivor ends with the same name.

Each rank keeps a listening socket that it reads only after a failure. The kernel closes it with the process, so a refused connection means
that the process is gone; until then the kernel keeps what others send to it. A survivor tells all others its verdict before it ends, so
whoever fails later, when that survivor is gone too, reads the verdict instead of guessing.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

import torch.distributed as dist

_HERE = "here "
_BACKLOG = 1024


class Presence:
    """One rank's listening socket and the addresses of all others.

    store: shared by all ranks, used only now. label: how this rank is named. grace: seconds in which ranks that are alive must answer
    after a time-out.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, label: str, *, host: str, grace: float) -> None:
        self._rank, self.grace, self._host = rank, grace, host
        self._socket = socket.create_server((host, 0), backlog=_BACKLOG)
        self._socket.setblocking(False)
        store.set(f"rlk/presence/{rank}", f"{self._socket.getsockname()[1]} {label}")
        entries = [store.get(f"rlk/presence/{r}").decode().split(" ", 1) for r in range(size)]
        self._ports = {r: int(port) for r, (port, _) in enumerate(entries) if r != rank}
        self.labels = [name for _, name in entries]

    def verdict(self, symptom: str) -> str:
        """One line that names what broke the collective; the same on every surviving rank. symptom: the transport's own message."""
        deadline = time.monotonic() + self.grace
        heard: set[int] = set()
        pause = 0.02
        gone = self._tell(f"{_HERE}{self._rank}")
        while True:
            # Read after looking: a survivor that is gone by now told its verdict before it went.
            for text in self._mail():
                if not text.startswith(_HERE):
                    return text
                heard.add(int(text.removeprefix(_HERE)))
            silent = sorted(self._ports.keys() - heard)
            if gone:
                found = f"{self._list(gone)} is gone: its process died or left before the others; read its log, and start the job again"
            elif not silent:
                found = (
                    f"no rank is gone, but not all wait for one collective ({symptom}): make the same calls in the same order on every rank"
                )
            elif time.monotonic() > deadline:
                found = f"{self._list(silent)} does not answer: look why it hangs, and start the job again"
            else:
                time.sleep(pause)
                pause = min(2 * pause, 5.0)
                gone = self._tell("")
                continue
            self._tell(found)
            return found

    def gone(self) -> bool:
        """Whether the process of another rank has ended."""
        return bool(self._tell(""))

    def close(self) -> None:
        """Stop being present."""
        self._socket.close()

    def _tell(self, text: str) -> list[int]:
        """Send a text to every other rank; the ranks that are gone."""
        gone = []
        for rank, port in self._ports.items():
            try:
                with socket.create_connection((self._host, port), timeout=5) as line:
                    line.sendall(text.encode())
            except (ConnectionRefusedError, ConnectionResetError):
                gone.append(rank)
            except OSError:
                pass  # it listens, but its queue is full: it has not looked for a while
        return gone

    def _mail(self) -> list[str]:
        """Texts that others have sent since the last look."""
        texts: list[str] = []
        while True:
            try:
                line, _ = self._socket.accept()
            except BlockingIOError:
                return [text for text in texts if text]
            with line:
                line.settimeout(5)
                pieces = []
                while piece := line.recv(4096):
                    pieces.append(piece)
                texts.append(b"".join(pieces).decode())

    def _list(self, ranks: Sequence[int]) -> str:
        return " and ".join(self.labels[r] for r in ranks)
