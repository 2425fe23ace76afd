"""The trainer's process: joins the job and sets Megatron's parallel state on top."""

from __future__ import annotations

import inspect

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

from rlk.contract.topology import Topology
from rlk.parallel.collectives import Group
from rlk.parallel.rendezvous import TIMEOUT, ProcessGroupError, Transport, leave
from rlk.parallel.state import Parallel, join_topology
from rlk.train.megatron import CPU

_parallel: Parallel | None = None


def require_device(name: str) -> torch.device:
    """The device called "cpu", "cuda" (this process's current card) or "cuda:1"; raises ValueError for any other and for an absent card."""
    device = torch.device(name) if name == "cpu" or name.partition(":")[0] == "cuda" else None
    if device is None:
        raise ValueError(f"device={name!r} is unknown: use cpu, cuda or cuda:1")
    if device.type == "cpu":
        return device
    cards = torch.cuda.device_count()
    index = torch.cuda.current_device() if cards and device.index is None else device.index or 0
    if index >= cards:
        raise ValueError(f"device={name!r}: torch {torch.__version__} sees {cards} cards here: use cpu, or a machine with that card")
    return torch.device("cuda", index)


def start(
    rank: int = 0,
    port: int = 0,
    topology: Topology = Topology(),  # noqa: B008 (frozen)
    timeout: float = TIMEOUT,
    device: torch.device = CPU,
    transport: Transport = "gloo",
) -> Parallel:
    """Join the trainer's job and build Megatron's groups.

    rank: 0 … topology.train_ranks - 1, TP ranks first. device: becomes the process's current card, which Megatron builds on. Other
    arguments and errors: :func:`rlk.parallel.state.join_topology`. A second call in one process is fine if it asks for the same place,
    anything else raises ProcessGroupError.
    """
    global _parallel
    if not inspect.isbuiltin(torch.set_num_threads):
        raise ProcessGroupError("torch.set_num_threads is replaced, as vLLM does in its own process: start the trainer in another process")
    if _parallel is not None:
        held, link = _parallel.topology, _parallel.link
        if (link.rank, held.tp, held.cp, link.transport) != (rank, topology.tp, topology.cp, transport):
            place = f"rank {link.rank} of TP={held.tp}, CP={held.cp} over {link.transport}"
            raise ProcessGroupError(f"this process is {place}: start another process for another place")
        return _parallel
    if device.type != "cpu":
        torch.cuda.set_device(device)
    link = join_topology(rank, topology, port, timeout, transport)
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
    """Leave the job and forget Megatron's parallel state."""
    global _parallel
    if _parallel is None:
        return
    parallel_state.destroy_model_parallel()
    leave(_parallel.link)
    _parallel = None
