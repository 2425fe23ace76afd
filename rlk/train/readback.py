"""What really runs in the trainer's process, read from the built objects."""

from __future__ import annotations

import platform
from typing import Any

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from rlk.contract.numerics import ContractError
from rlk.contract.settings import require_neutral
from rlk.kernels import dispatch
from rlk.parallel.state import Parallel

_HOOKS = ("finalize_model_grads_func", "grad_sync_func", "no_sync_func", "param_sync_func")


def qualified(kind: type) -> str:
    """Module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def modules(model: torch.nn.Module) -> dict[str, dict[str, str]]:
    """Class of every module, and the nearest class in its ancestry that Megatron or torch defines (itself, if it is stock)."""
    found = {}
    for name, module in model.named_modules():
        stock = next(kind for kind in type(module).__mro__ if kind.__module__.startswith(("megatron.", "torch.")))
        found[name or "model"] = {"class": qualified(type(module)), "stock": qualified(stock)}
    return found


def gradient_scales(config: TransformerConfig) -> dict[str, float]:
    """Factors Megatron would apply to gradients after the loss boundary; raises ContractError unless each is exactly 1.

    Its data-parallel wrapper, schedules and ``finalize_model_grads``, which scale by micro-batches and ranks and reduce in their own order,
    act through the hooks of the configuration: one that is set is refused as well.
    """
    for hook in _HOOKS:
        if getattr(config, hook) is not None:
            raise ContractError(f"Megatron's {hook} is set: it reduces or scales gradients in its own order, leave it None")
    scale = config.grad_scale_func
    scales = {"grad_scale_func": 1.0 if scale is None else float(scale(torch.ones(()))), **dict.fromkeys(_HOOKS, 1.0)}
    require_neutral(scales)
    return scales


def parallel(place: Parallel) -> dict[str, Any]:
    """This rank's place: its shards and token leaves, the ranks it shares each axis with, and what carries their bytes."""
    return {
        "label": place.link.presence.labels[place.link.rank],
        "shards": list(place.shards),
        "token_leaves": list(place.leaves),
        "tp_ranks": list(place.tp.members),
        "cp_ranks": list(place.cp.members),
        "transport": place.link.transport,
        "order": "rank parts are subtree roots, joined by the tree of adjacent pairs in fp32",
    }


def process(device: torch.device) -> dict[str, Any]:
    """Versions, topology, device and floating-point state of this process."""
    tiny = torch.full((64,), 1e-39, device=device) * torch.ones(64, device=device)
    return {
        "device": "cpu" if device.type == "cpu" else f"{device}, {torch.cuda.get_device_name(device)}",
        "versions": {"megatron-core": megatron.core.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "tensor_parallel": parallel_state.get_tensor_model_parallel_world_size(),
        "context_parallel": parallel_state.get_context_parallel_world_size(),
        "threads": torch.get_num_threads(),
        "flushes_subnormals": bool((tiny == 0).any()),
    }


def kernels() -> list[dict[str, Any]]:
    """Operators of this project that ran in this process since the last reset."""
    return [vars(ran) for ran in dispatch.readback()]
