"""What the groups of one process share: checks between ranks, traffic counts and the search for a lost peer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from rlk.parallel.errors import MismatchError, ParallelError, PeerFailedError, PeerLostError
from rlk.parallel.presence import Presence
from rlk.parallel.traffic import Traffic
from rlk.parallel.transport import Transport

T = TypeVar("T")

_NOTE = 256
_DIGEST = 32


class Link:
    """One rank's side of the job. Create it on every rank at the same point.

    presence: finds lost ranks. transport: what carries the data of this link's groups. message_bytes: the largest message handed to it;
    any size gives the same bytes. host: all ranks, for messages in host memory, None if the default group carries them. busy: whether a
    transport call of this link is under way; lost: whether one failed. unanswered: of transports whose calls return before they end,
    whether one ended without its peers.
    """

    def __init__(
        self, presence: Presence, *, transport: Transport = "gloo", message_bytes: int = 1 << 28, host: dist.ProcessGroup | None = None
    ) -> None:
        self.presence, self.transport, self.message_bytes, self._host = presence, transport, message_bytes, host
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.traffic = Traffic()
        self.checking = True
        self.busy = self.lost = False
        self.unanswered: list[Callable[[], bool]] = []
        self._seen: set[str] = set()

    def run(self, call: Callable[[], T], group: str, op: str, bytes_sent: int) -> T:
        """Run one transport call and count it; a failure becomes PeerLostError with the name of the rank that is missing."""
        self.busy = True
        try:
            result = call()
        except RuntimeError as error:
            self.lost = True
            symptom = str(error).splitlines()[0]
            raise PeerLostError(f"{op} on {group}: {self.presence.verdict(symptom)}") from error
        finally:
            self.busy = False
        self.traffic.add(group, op, bytes_sent)
        return result

    def agree(self, what: str, value: str, handle: dist.ProcessGroup | None = None) -> None:
        """Raise MismatchError on every rank of a group (default: all) unless they hold one ``value``; ``what`` names it."""
        if dist.get_world_size(handle) > 1:
            self._notes(f"{what}\0{value}", f"{what}: {value}", handle)

    @contextmanager
    def unit(self, kind: str, data: str) -> Iterator[None]:
        """One stretch of work that all ranks enter with equal ``data``; raises MismatchError on every rank otherwise.

        data: everything on which the shapes inside depend. The first unit of a kind checks the shapes and dtypes of each collective in
        it, later ones rely on that check; collectives outside any unit are always checked.
        """
        self.agree(kind, data)
        self.checking = kind not in self._seen
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ParallelError) or not any(found() for found in self.unanswered):
                raise
            self.lost = True
            raise PeerLostError(f"{kind}: {self.presence.verdict(str(error).splitlines()[0])}") from error
        finally:
            self.checking = True
        self._seen.add(kind)

    def share(self, text: str) -> list[str]:
        """One text of every rank, in rank order."""
        if self.size == 1:
            return [text]
        raw = text.encode()
        heads = self._notes("share", str(len(raw)), None)
        sizes = [int(head) for head in heads]
        if not max(sizes):
            return [""] * self.size
        rows = self._gather(torch.frombuffer(bytearray(raw.ljust(max(sizes))), dtype=torch.uint8), None, "share")
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes)]

    def together(self, action: Callable[[], None]) -> None:
        """Run ``action`` on every rank; if it raises on any, all raise: that rank its own error, the others PeerFailedError."""
        failure: Exception | None = None
        try:
            action()
        except Exception as error:
            failure = error
        said = self.share("" if failure is None else f"{type(failure).__name__}: {failure}")
        if failure is not None:
            raise failure
        for rank, words in enumerate(said):
            if words:
                raise PeerFailedError(f"{self.presence.labels[rank]} raised {words}")

    def lead(self, action: Callable[[], str]) -> str:
        """Run ``action`` on rank 0 alone and give its text to every rank; if it raises there, every rank raises."""
        result = [""]

        def first() -> None:
            if self.rank == 0:
                result[0] = action()

        self.together(first)
        return self.share(result[0])[0]

    def _notes(self, subject: str, text: str, handle: dist.ProcessGroup | None) -> list[str]:
        """Every rank's text, cut to what fits; MismatchError on every rank unless they agree in ``subject``.

        All checks between ranks are messages of one size, so that ranks at different checks read each other instead of breaking.
        """
        digest = hashlib.sha256(subject.encode()).digest()
        note = digest + text.encode()[: _NOTE - _DIGEST].ljust(_NOTE - _DIGEST)
        notes = self._gather(torch.frombuffer(bytearray(note), dtype=torch.uint8), handle, "check")
        texts = [bytes(raw[_DIGEST:].tolist()).decode(errors="replace").strip() for raw in notes]
        if not (notes[:, :_DIGEST] == notes[0, :_DIGEST]).all():
            held: dict[str, list[str]] = {}
            for rank, said in zip(dist.get_process_group_ranks(handle or dist.group.WORLD), texts):
                held.setdefault(said, []).append(self.presence.labels[rank])
            listed = "; ".join(f"{' and '.join(names)} has {said}" for said, names in held.items())
            raise MismatchError(f"ranks differ: {listed}: start every rank with the same code, settings and data")
        return texts

    def _gather(self, row: torch.Tensor, handle: dist.ProcessGroup | None, op: str) -> torch.Tensor:
        size = dist.get_world_size(handle)
        rows = row.new_empty(size, row.numel())
        name = "world" if handle is None else f"{size} ranks"
        self.run(lambda: dist.all_gather(list(rows), row, group=handle or self._host), name, op, (size - 1) * row.nbytes)
        return rows
