"""Process groups of the trainer: gloo on loopback, Megatron's parallel state on top."""

from __future__ import annotations

import inspect
import json
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from rlk.contract.topology import Topology
from rlk.parallel.collectives import Group
from rlk.parallel.errors import ParallelError
from rlk.parallel.link import Link
from rlk.parallel.presence import Presence
from rlk.parallel.state import Parallel, rank_label

LOOPBACK = "127.0.0.1"
TIMEOUT = 300.0
GRACE = 5.0

_parallel: Parallel | None = None


class ProcessGroupError(RuntimeError):
    """The process groups could not be set up; the message names the port or the topology and the remedy."""


def _listen(port: int) -> socket.socket:
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


def start(
    rank: int = 0,
    port: int = 0,
    topology: Topology = Topology(),  # noqa: B008 (frozen)
    timeout: float = TIMEOUT,
    grace: float = GRACE,
) -> Parallel:
    """Join the trainer's process group and set Megatron's parallel state.

    rank: 0 … topology.train_ranks - 1, TP ranks first. port: rendezvous on loopback; rank 0 listens there, 0 takes a free one (possible
    only in a world of one). timeout: seconds after which a collective without an answer fails; grace: seconds that survivors then give
    each other. A second call in one process is fine if it asks for the same topology, anything else raises ProcessGroupError.
    Raises MismatchError on every rank whose contract version or numerics differ from another's.
    """
    global _parallel
    if not inspect.isbuiltin(torch.set_num_threads):
        raise ProcessGroupError("torch.set_num_threads is replaced, as vLLM does in its own process: start the trainer in another process")
    size = topology.train_ranks
    if _parallel is not None:
        held = _parallel.topology
        if (dist.get_rank(), held.tp, held.cp) != (rank, topology.tp, topology.cp):
            raise ProcessGroupError(
                f"this process is rank {dist.get_rank()} with TP, CP = {held.tp, held.cp}: start another process for a new topology"
            )
        return _parallel
    if not 0 <= rank < size:
        raise ProcessGroupError(f"rank {rank} is outside TP·CP = {size}: use 0 … {size - 1}")
    if port == 0 and size > 1:
        raise ProcessGroupError(f"TP·CP = {size} needs one port that every rank knows: give port > 0")
    # Gloo would otherwise listen on the address of the host's name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    wait = timedelta(seconds=timeout)
    if rank == 0:
        # A TCPStore that opens its own socket listens on every interface.
        listener = _listen(port)
        port = listener.getsockname()[1]
        store = dist.TCPStore(LOOPBACK, port, size, True, timeout=wait, master_listen_fd=listener.detach())
    else:
        store = dist.TCPStore(LOOPBACK, port, size, False, timeout=wait)
    presence = Presence(store, rank, size, rank_label(rank, topology), host=LOOPBACK, grace=grace)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    link = Link(presence, device=torch.device("cpu"))
    try:
        link.agree("contract", json.dumps({"tp": topology.tp, "cp": topology.cp, **topology.numerics.as_dict()}))
    except ParallelError:
        dist.destroy_process_group()
        presence.close()
        raise
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=topology.tp, context_parallel_size=topology.cp, distributed_timeout_minutes=timeout / 60
    )
    # Dropout is 0, so nothing draws; Megatron's training tracker would ask for a CUDA generator.
    initialize_rng_tracker(inference_rng_tracker=True)
    tp = Group("tp", link, parallel_state.get_tensor_model_parallel_group())
    cp = Group("cp", link, parallel_state.get_context_parallel_group())
    _parallel = Parallel(topology, link, tp, cp)
    return _parallel


def stop() -> None:
    """Leave the process group and forget Megatron's parallel state."""
    global _parallel
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    if _parallel is not None:
        _parallel.link.presence.close()
    _parallel = None
