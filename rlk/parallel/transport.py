"""How one message gets from rank to rank: bytes are gathered or exchanged, nothing is added.

Every transport gives equal bytes; they differ in what carries them. A call that a lost or silent rank leaves unanswered raises
RuntimeError, which :meth:`rlk.parallel.link.Link.run` turns into the name of that rank.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from rlk.parallel.link import Link

Transport = Literal["gloo", "shm", "ipc", "nccl", "peer"]
"""gloo: host memory and sockets, for tensors anywhere; those of a card pass through pinned memory. shm: ranks of one host share its memory,
for tensors anywhere. ipc: ranks of one host read each other's card memory (CUDA or HIP IPC). Any number of ranks may share a card over
these. nccl: one card per rank, also under ROCm, whose RCCL torch calls by that name. peer: one card per rank of one host, whose cards write
each other's memory; no host takes part (``rlk.parallel.peer``)."""

BACKEND: dict[Transport, str] = {"gloo": "gloo", "shm": "gloo", "ipc": "gloo", "nccl": "cpu:gloo,cuda:nccl", "peer": "gloo"}
"""Process groups that torch makes; checks between ranks are messages in host memory whatever carries the data."""

OWN_CARD: tuple[Transport, ...] = ("nccl", "peer")
"""Transports that want a card for every rank."""

MAILBOX_BYTES = 1 << 26

_FIRST_LOOK, _PAUSE = 1.0, 1e-4


class Gloo:
    """Through host memory. whole_below: bytes up to which a sum is cheaper if every rank gathers all parts and adds them itself."""

    whole_below: ClassVar[int] = 0

    def __init__(self, link: Link, handle: dist.ProcessGroup) -> None:
        self.link, self.handle = link, handle
        self.rank, self.size = dist.get_rank(handle), dist.get_world_size(handle)

    def gather(self, piece: torch.Tensor) -> torch.Tensor:
        """[n] of every rank -> [ranks, n]."""
        sent = _on_host(piece)
        received = _host_memory((self.size, *piece.shape), piece)
        dist.all_gather(list(received), sent, group=self.handle)
        return received.to(piece.device)

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """[ranks, n], row r for rank r -> [ranks, n], row r from rank r."""
        sent = _on_host(rows)
        received = _host_memory(rows.shape, rows)
        dist.all_to_all_single(received, sent, group=self.handle)
        return received.to(rows.device)


class Nccl(Gloo):
    """From card to card. The host waits for each message, so that a rank that is lost is named and nothing is read that never came; in a
    graph that is captured the stream waits alone."""

    whole_below: ClassVar[int] = 1 << 18

    def gather(self, piece: torch.Tensor) -> torch.Tensor:
        received = piece.new_empty((self.size, *piece.shape))
        return self._waited(received, dist.all_gather_into_tensor(received.view(-1), piece, group=self.handle, async_op=True))

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(rows)
        return self._waited(received, dist.all_to_all_single(received, rows, group=self.handle, async_op=True))

    def _waited(self, received: torch.Tensor, work: dist.Work) -> torch.Tensor:
        if received.is_cuda and torch.cuda.is_current_stream_capturing():
            work.wait()
            return received
        presence = self.link.presence
        began = time.monotonic()
        look = began + _FIRST_LOOK
        while not work.is_completed():
            now = time.monotonic()
            if now > look:
                if presence.gone():
                    raise RuntimeError("a process is gone")
                if now > began + presence.grace:
                    raise RuntimeError(f"no answer in {presence.grace:g} s")
                look = now + _FIRST_LOOK
            if now > began + 0.01:
                time.sleep(_PAUSE)
        work.wait()
        return received


class Shm(Gloo):
    """Each rank has a mailbox that the others of its host map: it writes, all wait, the others read, all wait."""

    whole_below: ClassVar[int] = 1 << 20

    def __init__(self, link: Link, handle: dist.ProcessGroup) -> None:
        super().__init__(link, handle)
        self._boxes = self._map(dist.get_process_group_ranks(handle))

    def gather(self, piece: torch.Tensor) -> torch.Tensor:
        received = piece.new_empty((self.size, *piece.shape))
        self._pass(piece, lambda rank, box: received[rank].copy_(box))
        return received

    def exchange(self, rows: torch.Tensor) -> torch.Tensor:
        received = torch.empty_like(rows)
        self._pass(rows, lambda rank, box: received[rank].copy_(box[self.rank]))
        return received

    def _map(self, members: list[int]) -> list[torch.Tensor]:
        """Mailboxes of the members, in order: memory of each without a name in any file system, which ends with its last process."""
        descriptor = os.memfd_create("rlk-mailbox")
        os.ftruncate(descriptor, MAILBOX_BYTES)
        every = self.link.share(f"/proc/{os.getpid()}/fd/{descriptor}")
        boxes = [torch.from_file(every[rank], shared=True, size=MAILBOX_BYTES, dtype=torch.uint8) for rank in members]
        dist.barrier(group=self.handle)
        os.close(descriptor)
        return boxes

    def _pass(self, sent: torch.Tensor, read: Callable[[int, torch.Tensor], object]) -> None:
        view = lambda box: box[: sent.nbytes].view(sent.dtype).view(sent.shape)
        view(self._boxes[self.rank]).copy_(sent)
        self._settle(sent)
        for rank, box in enumerate(self._boxes):
            read(rank, view(box))
        self._settle(sent)

    def _settle(self, sent: torch.Tensor) -> None:
        """Every rank has finished what it was told so far."""
        if sent.is_cuda:
            torch.cuda.current_stream().synchronize()
        dist.barrier(group=self.handle)


class Ipc(Shm):
    """Mailboxes in the memory of the cards."""

    def _map(self, members: list[int]) -> list[torch.Tensor]:
        own = torch.empty(MAILBOX_BYTES, dtype=torch.uint8, device="cuda")
        told = [field.hex() if isinstance(field, bytes) else field for field in own.untyped_storage()._share_cuda_()]
        every = [json.loads(text) for text in self.link.share(json.dumps(told))]
        return [own if rank == self.link.rank else _mapped(every[rank]) for rank in members]


MESSAGE_BYTES: dict[Transport, int] = {"gloo": 1 << 28, "shm": MAILBOX_BYTES, "ipc": MAILBOX_BYTES, "nccl": 1 << 28, "peer": 1 << 28}
"""Largest message of each; any size gives the same bytes."""


def _host_memory(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Memory that messages of ``like`` are sent from: pinned for a card's, so that copies run at full speed."""
    return torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return _host_memory(tensor.shape, tensor).copy_(tensor) if tensor.is_cuda else tensor


def _mapped(told: list[object]) -> torch.Tensor:
    """The memory that another process has shared; mapped for as long as the tensor lives."""
    fields = [bytes.fromhex(field) if isinstance(field, str) else field for field in told]
    storage = torch.UntypedStorage._new_shared_cuda(*fields)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
