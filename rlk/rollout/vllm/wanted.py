"""What vLLM is started with for a mode and a device, and what the engine must read back afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlk.contract.arms import MIXED_MODES, MODES, ROUTES, Mode, routes_of
from rlk.contract.numerics import Numerics
from rlk.parallel.transport import Transport
from rlk.rollout.vllm.plugin import MIXED_MODEL, MODEL
from rlk.rollout.vllm.settings import EXTENSION, LOGPROBS_MODE, WORKERS, EngineRefusal, additional_config, architecture

Device = Literal["cpu", "cuda"]
TRANSPORTS: dict[str, tuple[Transport, ...]] = {"cpu": ("gloo",), "cuda": ("peer", "nccl")}
"""What may move the bytes of the ranks of an engine, by device, its own choice first; on cards without a host, as a graph replays it."""

BLOCK_SIZE = 16
"""Tokens per KV page where attention is this project's; native attention keeps vLLM's own choice."""

LARGEST_GRAPH = 512
"""Decode steps of more rows run eagerly."""

_UNUSED_SHARE = 0.01
"""vLLM checks this share of the card's memory and then ignores it, since the size of the KV cache is given; others may have the rest."""

_RUNNERS = {"cpu": "vllm.v1.worker.cpu_model_runner.CPUModelRunner", "cuda": "vllm.v1.worker.gpu_model_runner.GPUModelRunner"}
_SAMPLERS = {"cpu": "rlk.rollout.vllm.sampler.HostSampler", "cuda": "rlk.rollout.vllm.sampler_cuda.DeviceStrictSampler"}
_NATIVE_SAMPLER = "vllm.v1.sample.sampler.Sampler"
_ATTENTION = "rlk.rollout.vllm.attention.RlkAttentionImpl"
_NATIVE_WORKERS = {"cpu": "vllm.v1.worker.cpu_worker.CPUWorker", "cuda": "vllm.v1.worker.gpu_worker.Worker"}
_NATIVE_ATTENTION = {
    "cpu": "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl",
    "cuda": "vllm.v1.attention.backends.flash_attn.FlashAttentionImpl",
}


@dataclass(frozen=True)
class Wanted:
    """An engine as it was asked for; the fields are arguments of ``VllmEngine``, every choice made. EngineRefusal if they contradict.

    cudagraph_sizes: ascending; empty for an eager engine. transport: None for the first of ``TRANSPORTS``.
    """

    checkpoint: Path
    mode: Mode
    device: Device
    eager: bool
    cudagraph_sizes: tuple[int, ...]
    numerics: Numerics
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    kv_cache_bytes: int
    seed: int
    tensor_parallel_size: int
    transport: Transport | None = None

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise EngineRefusal(f"mode={self.mode!r} is neither 'strict' nor 'native' nor one of {', '.join(MIXED_MODES)}")
        if self.device not in WORKERS:
            raise EngineRefusal(f"device={self.device!r} is neither 'cpu' nor 'cuda': an engine runs where it is told to")
        if self.device == "cpu" and not self.eager:
            raise EngineRefusal("enforce_eager=False on the CPU: vLLM captures graphs on a card only")
        if self.mode in MIXED_MODES and not self.eager:
            raise EngineRefusal(f"enforce_eager=False with mode={self.mode!r}: graphs are captured of strict and native models only")
        if self.mode in MIXED_MODES and self.tensor_parallel_size > 1:
            ranks = self.tensor_parallel_size
            raise EngineRefusal(f"mode={self.mode!r} with tensor_parallel_size={ranks}: run a mixed engine on one rank")
        if self.transport not in (None, *TRANSPORTS[self.device]):
            usable = " or ".join(TRANSPORTS[self.device])
            raise EngineRefusal(f"transport={self.transport!r} does not move bytes between ranks of vLLM on {self.device}: use {usable}")

    def arguments(self) -> dict[str, Any]:
        """Of ``vllm.LLM``."""
        asked: dict[str, Any] = {
            "model": str(self.checkpoint),
            "skip_tokenizer_init": True,
            "generation_config": "vllm",
            "dtype": "bfloat16",
            **self._shared(),
            "kv_cache_memory_bytes": self.kv_cache_bytes,
            "seed": self.seed,
            "use_tqdm_on_load": False,
            "disable_log_stats": False,
        }
        if self.tensor_parallel_size > 1:
            asked |= {"distributed_executor_backend": "mp", "disable_custom_all_reduce": self.mode != "native"}
        if self.device == "cuda":
            asked["gpu_memory_utilization"] = _UNUSED_SHARE
        if self.mode == "native":
            return {**asked, "worker_extension_cls": EXTENSION}
        if self.device == "cuda" and self.mode == "strict":
            sizes = {} if self.eager else {"cudagraph_capture_sizes": list(self.cudagraph_sizes)}
            asked |= {"compilation_config": {"mode": 0, "cudagraph_mode": self._graphs(), **sizes}, "async_scheduling": True}
        routes = routes_of(self.mode)
        if "attention" in routes:
            asked["block_size"] = BLOCK_SIZE
        return {
            **asked,
            "hf_overrides": {"architectures": [architecture(routes)]},
            "worker_cls": WORKERS[self.device],
            "additional_config": additional_config(self.numerics, routes, self.transport or TRANSPORTS[self.device][0]),
        }

    def read_back(self, layers: int) -> dict[str, Any]:
        """What a worker must find in its live objects, by name of ``WorkerExtension.rlk_readback``. layers: of the checkpoint."""
        asked = {
            **self._shared(),
            "device": self.device,
            "runner": _RUNNERS[self.device],
            "attention_layers": layers,
            "dtype": "torch.bfloat16",
            "subnormals_kept": True,
        }
        if self.eager:
            asked |= {"compile_mode": 0, "cudagraph_mode": "NONE"}
        if self.mode == "native":
            return {
                **asked,
                "worker": _NATIVE_WORKERS[self.device],
                "model": "vllm.model_executor.models.qwen3.Qwen3ForCausalLM",
                "sampler": _NATIVE_SAMPLER,
                "attention": [_NATIVE_ATTENTION[self.device]],
                "numerics": None,
                "kernels": [],
            }
        routes = routes_of(self.mode)
        asked |= {
            "worker": WORKERS[self.device],
            "sampler": _SAMPLERS[self.device] if "logp" in routes else _NATIVE_SAMPLER,
            "attention": [_ATTENTION if "attention" in routes else _NATIVE_ATTENTION[self.device]],
            "numerics": self.numerics.as_dict(),
            "compile_mode": 0,
            "cudagraph_mode": self._graphs(),
        }
        if "attention" in routes:
            asked["block_size"] = BLOCK_SIZE
        if self.mode != "strict":
            operators = {route: "rlk" if route in routes else "native" for route in ROUTES}
            return {**asked, "model": MIXED_MODEL.replace(":", "."), "operators": operators}
        return {
            **asked,
            "model": MODEL.replace(":", "."),
            "cudagraph_sizes": list(self.cudagraph_sizes),
            "model_hash_of": "live parameters",
        }

    def require_captured(self, graphs: Sequence[dict[str, int]]) -> None:
        """EngineRefusal unless a strict engine captured one graph for each size that was asked for."""
        captured = [graph["rows"] for graph in graphs]
        if self.mode == "strict" and captured != list(self.cudagraph_sizes):
            asked = list(self.cudagraph_sizes)
            raise EngineRefusal(f"strict engine captured graphs of {captured} rows, asked for {asked}: take sizes up to max_num_seqs")

    def _shared(self) -> dict[str, Any]:
        """What vLLM is told and the worker reads back under one name."""
        return {
            "enforce_eager": self.eager,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "enable_chunked_prefill": True,
            "enable_prefix_caching": True,
            "logprobs_mode": LOGPROBS_MODE,
            "tensor_parallel_size": self.tensor_parallel_size,
        }

    def _graphs(self) -> str:
        return "NONE" if self.eager else "FULL_DECODE_ONLY"


def default_cudagraph_sizes(most: int) -> list[int]:
    """Rows of the graphs of a strict engine: 1, 2, 4, then steps of 8 to 256 and of 16 beyond, and the most rows that a step can have."""
    steps = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_GRAPH + 1, 16)]
    return sorted({size for size in steps if size <= most} | {min(most, LARGEST_GRAPH)})
