"""Process groups of the trainer: gloo on loopback, Megatron's parallel state on top."""

from __future__ import annotations

import inspect
import os
import socket
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker

LOOPBACK = "127.0.0.1"
TIMEOUT = timedelta(seconds=300)


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


def start(rank: int = 0, world_size: int = 1, port: int = 0, tensor_parallel: int = 1, context_parallel: int = 1) -> None:
    """Join the trainer's process group and set Megatron's parallel state.

    port: rendezvous on loopback; rank 0 listens there, 0 takes a free one (possible only in a world of one). A second call in one
    process is fine if it asks for the same topology, anything else raises ProcessGroupError.
    """
    if not inspect.isbuiltin(torch.set_num_threads):
        raise ProcessGroupError("torch.set_num_threads is replaced, as vLLM does in its own process: start the trainer in another process")
    if dist.is_initialized():
        sizes = (dist.get_rank(), dist.get_world_size())
        groups = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
        )
        if (*sizes, *groups) != (rank, world_size, tensor_parallel, context_parallel):
            raise ProcessGroupError(
                f"this process is rank {sizes[0]} of {sizes[1]} with TP, CP = {groups}: start another process for a new topology"
            )
        return
    if port == 0 and world_size > 1:
        raise ProcessGroupError(f"world_size={world_size} needs one port that every rank knows: give port > 0")
    # Gloo would otherwise listen on the address of the host's name.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank == 0:
        # A TCPStore that opens its own socket listens on every interface.
        listener = _listen(port)
        port = listener.getsockname()[1]
        store = dist.TCPStore(LOOPBACK, port, world_size, True, timeout=TIMEOUT, master_listen_fd=listener.detach())
    else:
        store = dist.TCPStore(LOOPBACK, port, world_size, False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel, context_parallel_size=context_parallel)
    # Dropout is 0, so nothing draws; Megatron's training tracker would ask for a CUDA generator.
    initialize_rng_tracker(inference_rng_tracker=True)


def stop() -> None:
    """Leave the process group and forget Megatron's parallel state."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
