"""How the processes of one job find each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from rlk.parallel.errors import ParallelError
from rlk.parallel.link import Link
from rlk.parallel.presence import Presence
from rlk.parallel.transport import BACKEND, MESSAGE_BYTES, OWN_CARD, Transport

LOOPBACK = "127.0.0.1"
TIMEOUT = 300.0


class ProcessGroupError(RuntimeError):
    """The process groups could not be set up; the message names the port or the topology and the remedy."""


def listen(port: int) -> socket.socket:
    """A listening socket on loopback, 0 for a free port."""
    listener = socket.socket()
    try:
        listener.bind((LOOPBACK, port))
    except OSError as error:
        listener.close()
        raise ProcessGroupError(
            f"port {port} on {LOOPBACK} cannot be opened ({error.strerror}): choose another, or 0 for a free one"
        ) from error
    listener.listen()
    return listener


def join(rank: int, labels: Sequence[str], port: int, agreement: str, *, transport: Transport = "gloo", timeout: float = TIMEOUT) -> Link:
    """Join a job of len(labels) ranks; rank 0 serves the store on loopback.

    labels: names of all ranks. transport: nccl and ipc carry tensors of each process's current card. port: known to every rank; 0, a free
    one, is possible only in a job of one. agreement: what all ranks must hold equally before anything runs. timeout: seconds after which a
    collective without an answer fails, and which survivors then give each other to answer. Raises ProcessGroupError, or MismatchError on
    every rank if the agreements differ.
    """
    size = len(labels)
    if not 0 <= rank < size:
        raise ProcessGroupError(f"rank {rank} is outside a job of {size}: use 0 … {size - 1}")
    if port == 0 and size > 1:
        raise ProcessGroupError(f"a job of {size} needs one port that every rank knows: give port > 0")
    # Gloo would otherwise listen on the address of the host's name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    wait = timedelta(seconds=timeout)
    if rank == 0:
        # A TCPStore that opens its own socket listens on every interface.
        listener = listen(port)
        port = listener.getsockname()[1]
        store = dist.TCPStore(LOOPBACK, port, size, True, timeout=wait, master_listen_fd=listener.detach())
    else:
        store = dist.TCPStore(LOOPBACK, port, size, False, timeout=wait)
    presence = Presence(store, rank, size, labels[rank], host=LOOPBACK, grace=timeout)
    if transport in OWN_CARD:
        require_own_card(store, rank, labels, str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))
    if transport == "nccl":
        # A call that nobody answers is found and named by the transport; torch's watchdog would end the process without a word.
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    dist.init_process_group(BACKEND[transport], store=store, rank=rank, world_size=size, timeout=wait)
    link = Link(presence, transport=transport, message_bytes=MESSAGE_BYTES[transport])
    try:
        link.agree("agreement", agreement)
    except ParallelError:
        leave(link)
        raise
    return link


def require_own_card(store: dist.Store, rank: int, labels: Sequence[str], card: str) -> None:
    """Raise ProcessGroupError on every rank unless each has a ``card`` (any name of it) of its own."""
    store.set(f"rlk/card/{rank}", card)
    cards = [store.get(f"rlk/card/{number}").decode() for number in range(len(labels))]
    # Rank 0 serves the store, so it may leave only after all have read.
    store.set(f"rlk/card/read/{rank}", "")
    for number in range(len(labels) if rank == 0 else 0):
        store.get(f"rlk/card/read/{number}")
    for number, held in enumerate(cards):
        first = cards.index(held)
        if first != number:
            remedy = f"use transport shm, or one card per rank for {' and '.join(OWN_CARD)}"
            raise ProcessGroupError(f"{labels[first]} and {labels[number]} share card {held}: {remedy}")


def leave(link: Link) -> None:
    """Leave the job; the other ranks' collectives fail from now on."""
    if link.lost and link.transport == "nccl":
        dist.distributed_c10d._abort_process_group()  # to end in order would wait for the call that nobody answers
    else:
        dist.destroy_process_group()
    link.presence.close()
