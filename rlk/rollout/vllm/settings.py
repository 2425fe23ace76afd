"""What strict mode asks of vLLM, and the refusal of everything else: read by the engine, the worker and the model alike."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlk.contract.arms import ROUTES
from rlk.contract.numerics import CONTRACT_VERSION, ContractError, Numerics
from rlk.contract.topology import Topology
from rlk.model.config import Qwen3Config
from rlk.parallel.transport import Transport
from rlk.rollout.vllm.plugin import ARCHITECTURE, MIXED_ARCHITECTURE

if TYPE_CHECKING:
    from vllm.config import VllmConfig

KEY = "rlk"
"""Name of our entry in vLLM's ``additional_config`` and in a request's ``extra_args``."""

WORKERS = {"cpu": "rlk.rollout.vllm.worker_cpu.StrictCpuWorker", "cuda": "rlk.rollout.vllm.worker_cuda.StrictCudaWorker"}
"""The strict worker of each device."""
EXTENSION = "rlk.rollout.vllm.extension.WorkerExtension"
LOGPROBS_MODE = "processed_logprobs"


class EngineRefusal(RuntimeError):
    """The engine was asked for something that strict mode cannot keep, or runs something else than was asked; names it."""


def additional_config(numerics: Numerics, routes: Sequence[str] = ROUTES, transport: Transport = "gloo") -> dict[str, Any]:
    """The plain JSON that carries ``numerics``, the routes that run this project's operators, and what moves the bytes of tensor parallel
    ranks, to wherever vLLM builds the model."""
    return {KEY: {"numerics": numerics.as_dict(), "routes": list(routes), "transport": transport}}


def numerics_of(vllm_config: VllmConfig) -> Numerics:
    """The numerics that travelled in ``additional_config``; EngineRefusal without them or of another contract version."""
    carried = vllm_config.additional_config
    if not isinstance(carried, dict) or KEY not in carried:
        raise EngineRefusal(f"additional_config has no {KEY!r} entry: start strict engines through rlk.rollout.vllm.engine.VllmEngine")
    fields = dict(carried[KEY]["numerics"])
    version = fields.pop("contract_version")
    if version != CONTRACT_VERSION:
        raise EngineRefusal(
            f"numerics are of contract version {version}, this worker implements {CONTRACT_VERSION}: install one rlk everywhere"
        )
    try:
        return Numerics(**fields)
    except (TypeError, ContractError) as error:
        raise EngineRefusal(f"numerics {fields} are not usable: {error}") from error


def carried_routes(vllm_config: VllmConfig) -> tuple[str, ...]:
    """The routes that travelled in ``additional_config``."""
    return tuple(vllm_config.additional_config[KEY]["routes"])


def transport_of(vllm_config: VllmConfig) -> Transport:
    """The transport that travelled in ``additional_config``."""
    transport: Transport = vllm_config.additional_config[KEY]["transport"]
    return transport


def architecture(routes: Sequence[str]) -> str:
    """The model that runs these routes with this project's operators."""
    return ARCHITECTURE if tuple(routes) == ROUTES else MIXED_ARCHITECTURE


def device_of(vllm_config: VllmConfig) -> str:
    """ "cpu" or "cuda"."""
    return str(vllm_config.device_config.device_type)


def require_supported(vllm_config: VllmConfig) -> Qwen3Config:
    """Refuse by name everything that strict mode does not cover; returns the model's configuration."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    tp, ranks = parallel.tensor_parallel_size, parallel.world_size * parallel.data_parallel_size
    device, compilation, chosen = device_of(vllm_config), vllm_config.compilation_config, vllm_config.attention_config.backend
    graphs = getattr(compilation.cudagraph_mode, "name", None) or "NONE"
    numerics, routes = numerics_of(vllm_config), carried_routes(vllm_config)
    refused = {
        f"device {device}": device not in WORKERS,
        "speculative decoding": vllm_config.speculative_config is not None,
        "LoRA": vllm_config.lora_config is not None,
        "quantization": model.quantization is not None,
        f"dtype {model.dtype}": str(model.dtype) != "torch.bfloat16",
        f"KV cache dtype {cache.cache_dtype}": cache.cache_dtype not in ("auto", "bfloat16"),
        f"{ranks} ranks of which {tp} are tensor parallel": ranks != tp,
        "a KV transfer connector": vllm_config.kv_transfer_config is not None,
        "custom logits processors": bool(model.logits_processors),
        f"attention backend {chosen}": chosen is not None,
        "VLLM_BATCH_INVARIANT, which replaces operators of torch,": os.environ.get("VLLM_BATCH_INVARIANT", "0") != "0",
        "asynchronous scheduling on the CPU": device == "cpu" and bool(vllm_config.scheduler_config.async_scheduling),
        f"compilation mode {int(compilation.mode or 0)}": bool(compilation.mode),
        f"CUDA graph mode {graphs}": graphs not in ("NONE", "FULL_DECODE_ONLY"),
        f"logprobs mode {model.logprobs_mode}": model.logprobs_mode != LOGPROBS_MODE,
        f"architectures {model.architectures}": list(model.architectures or ()) != [architecture(routes)],
        "CUDA graphs of a mixed model": graphs != "NONE" and routes != ROUTES,
        f"worker class {parallel.worker_cls}": parallel.worker_cls != WORKERS.get(device),
    }
    for name, present in refused.items():
        if present:
            raise EngineRefusal(f"strict mode does not support {name}: leave it out, or use mode='native'")
    config = Qwen3Config.from_json(Path(model.model))
    if model.max_model_len > config.max_position_embeddings:
        raise EngineRefusal(f"max_model_len={model.max_model_len} exceeds the {config.max_position_embeddings} positions of the model")
    config.require(numerics)
    try:
        Topology(rollout_tp=tp, numerics=numerics)
    except ContractError as error:
        raise EngineRefusal(f"tensor_parallel_size={tp}: {error}") from error
    return config
