"""Methods that VllmEngine calls inside the worker (``collective_rpc``): weights, read-back, supports, traces. Plain types only.

Mixed into the strict worker and into the stock one alike; it adds methods and replaces none.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import vllm
from safetensors.torch import save_file

from rlk.contract.topology import owned
from rlk.evidence.clock import Clock
from rlk.kernels import dispatch
from rlk.model.config import Qwen3Config
from rlk.model.routes import RouteLog
from rlk.model.weights import load_checkpoint, model_hash
from rlk.rollout.vllm.mixed import MixedQwen3ForCausalLM
from rlk.rollout.vllm.model import RlkQwen3ForCausalLM
from rlk.rollout.vllm.sampler import StrictSampler
from rlk.rollout.vllm.settings import EngineRefusal, device_of


class WorkerExtension:
    """State lives in the worker, so that a version or a hash is never what the caller believes but what the worker holds."""

    model_runner: Any
    vllm_config: Any
    _rlk_version: int | None
    _rlk_hash: str
    _rlk_clock: Clock
    _rlk_before: dict[tuple[str, str, str], int]

    def rlk_start(self) -> None:
        """Take the identity of the weights that vLLM loaded; counts of operators start here."""
        self._rlk_version, self._rlk_clock = None, Clock(torch.device(device_of(self.vllm_config)))
        path = self.vllm_config.model_config.model
        self._rlk_hash = self._rlk_confirm(path, load_checkpoint(Path(path)).model_hash)
        if log := self._rlk_routes():
            log.reset()
        self._rlk_before = {(ran.op, ran.backend, ran.kernel_id): ran.calls for ran in dispatch.readback()}

    def rlk_answer(self, method: str, *arguments: Any) -> tuple[str, Any]:
        """("", what another method returns) or (its error, None): vLLM takes no more than one rank's error out of its queues, and would
        give the others' to later calls."""
        try:
            return "", getattr(self, method)(*arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}", None

    def rlk_load_weights(self, path: str, announced: str | None) -> str:
        """Replace the weights by those of a checkpoint directory and return the hash of what is live afterwards.

        Until :meth:`rlk_serve` the version is unknown. EngineRefusal, with the old weights and version untouched, if the files do not
        hash to ``announced`` or belong to another configuration; CheckpointError for a tensor that is missing, extra or misshapen.
        """
        clock = self._rlk_clock
        with clock("read"):
            checkpoint = load_checkpoint(Path(path))
            found = checkpoint.model_hash
        if announced is not None and found != announced:
            raise EngineRefusal(f"{path}: weights hash to {found}, announced was {announced}: publish the checkpoint again")
        if checkpoint.config != Qwen3Config.from_json(Path(self.vllm_config.model_config.model)):
            raise EngineRefusal(f"{path}: its config.json differs from the model that this engine was built for: start another engine")
        self._rlk_version = None
        model = self.model_runner.get_model()
        with clock("copy"):
            if isinstance(model, RlkQwen3ForCausalLM):
                model.load_weights(checkpoint.tensors.items())
            else:
                self.reload_weights(weights_iterator=iter(checkpoint.tensors.items()))  # type: ignore[attr-defined]
        with clock("hash"):
            self._rlk_hash = self._rlk_confirm(path, found)
        return self._rlk_hash

    def rlk_serve(self, version: int) -> None:
        """Name the loaded weights; only then does the engine answer requests."""
        self._rlk_version = version

    def rlk_identity(self) -> tuple[int | None, str]:
        """Version that is served, and the hash of its weights, as it was found when they were taken."""
        return self._rlk_version, self._rlk_hash

    def rlk_seconds(self) -> dict[str, float]:
        """Of the parts of the last :meth:`rlk_load_weights`."""
        return self._rlk_clock.seconds

    def rlk_begin(self, supports: bool) -> int | None:
        """Forget earlier supports, and keep the next ones if they are asked for; the version about to serve, None while it is unknown."""
        sampler = self._rlk_sampler()
        if sampler:
            sampler.clear(supports)
        return self._rlk_version

    def rlk_finish(self) -> dict[str, Any]:
        """Version that served, and [sample id, [retained ids of each output position]] of every truncating request if they were kept.

        FloatingPointError if a row of logits was not finite.
        """
        sampler = self._rlk_sampler()
        if sampler:
            sampler.check()
        return {"weight_version": self._rlk_version, "supports": sampler.retained() if sampler else []}

    def rlk_trace(self, on: bool, positions: list[int] | None = None) -> None:
        """Collect the intermediates of strict mode from now on, at these positions (None: all), or stop and forget them."""
        sampler = self._rlk_sampler()
        if not sampler or self._rlk_routes():
            raise EngineRefusal("a native engine has no trace: use mode='strict'")
        sampler.recorder.switch(on, positions)
        self._rlk_graphs(not on)

    def rlk_save_trace(self, path: str) -> None:
        """Write the collected intermediates as one safetensors file (names: ``StepRecorder.tensors``)."""
        sampler = self._rlk_sampler()
        save_file(sampler.recorder.tensors() if sampler else {}, path)

    def rlk_readback(self) -> dict[str, Any]:
        """What this worker really built and ran, looked up in the live objects."""
        runner, config = self.model_runner, self.vllm_config
        model = runner.get_model()
        layers = [module for module in model.modules() if hasattr(module, "impl")]
        sampler, log = self._rlk_sampler(), self._rlk_routes()
        live = self._rlk_weights_hash()
        cache = layers[0].kv_cache
        found = {
            "worker": _name(self),
            "runner": _name(runner),
            "model": _name(model),
            "modules": sorted({type(module).__module__ for module in model.modules()}),
            "sampler": _name(runner.sampler),
            "attention": sorted({_name(layer.impl) for layer in layers}),
            "attention_layers": len(layers),
            "kv_cache": {"shape": list(cache.shape), "stride": list(cache.stride()), "dtype": str(cache.dtype)},
            "dtype": str(config.model_config.dtype),
            "device": str(config.device_config.device_type),
            "compile_mode": int(config.compilation_config.mode or 0),
            "cudagraph_mode": getattr(config.compilation_config.cudagraph_mode, "name", None) or "NONE",
            "cudagraph_sizes": list(config.compilation_config.cudagraph_capture_sizes or ()),
            "cudagraphs": self._rlk_captured(),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "enforce_eager": bool(config.model_config.enforce_eager),
            "enable_chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
            "enable_prefix_caching": bool(config.cache_config.enable_prefix_caching),
            "block_size": int(config.cache_config.block_size),
            "max_model_len": int(config.model_config.max_model_len),
            "max_num_batched_tokens": int(config.scheduler_config.max_num_batched_tokens),
            "max_num_seqs": int(config.scheduler_config.max_num_seqs),
            "logprobs_mode": str(config.model_config.logprobs_mode),
            "numerics": model.dense.numerics.as_dict() if hasattr(model, "dense") else None,
            "partial_prefill_rows": sampler.partial_rows if sampler else None,
            "weight_version": self._rlk_version,
            "model_hash": live or self._rlk_hash,
            "tensor_parallel_size": int(config.parallel_config.tensor_parallel_size),
            "rank": self._rlk_rank(model) if live else None,
            "model_hash_of": "live parameters" if live else "files handed to vLLM's loader, which may repack and drop them",
            "kernels": self._rlk_kernels(),
            "operators": log.operators() if log else None,
            "routes": log.readback() if log else None,
            "subnormals_kept": _subnormals_kept(cache.device),
            "threads": torch.get_num_threads(),
            "pid": os.getpid(),
            "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("VLLM_", "OMP_"))},
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__, "python": platform.python_version()},
        }
        # A subclass of str (torch's version is one) kills vLLM's output thread on its way to another process; JSON leaves plain types.
        plain: dict[str, Any] = json.loads(json.dumps(found))
        return plain

    def rlk_peak_memory(self) -> dict[str, int]:
        """Most bytes on this rank's card that torch had reserved, and of them allocated."""
        return {"peak_reserved": torch.cuda.max_memory_reserved(), "peak_allocated": torch.cuda.max_memory_allocated()}

    def _rlk_graphs(self, on: bool) -> None:
        """Replay captured graphs again, or run every step eagerly: a replayed graph shows no intermediates."""
        dispatcher = getattr(self.model_runner, "cudagraph_dispatcher", None)
        if dispatcher is not None:
            mode = self.vllm_config.compilation_config.cudagraph_mode
            dispatcher.cudagraph_mode = mode if on else type(mode).NONE

    def _rlk_captured(self) -> list[dict[str, int]]:
        """Every graph that was captured: rows, and how often it was replayed (strict mode)."""
        entries = getattr(self.model_runner.model, "concrete_cudagraph_entries", {})
        found = [{"rows": key.num_tokens, "replays": getattr(entry.cudagraph, "replays", -1)} for key, entry in entries.items()]
        return sorted(found, key=lambda graph: graph["rows"])

    def _rlk_sampler(self) -> StrictSampler | None:
        sampler = self.model_runner.sampler
        return sampler if isinstance(sampler, StrictSampler) else None

    def _rlk_routes(self) -> RouteLog | None:
        model = self.model_runner.get_model()
        return model.log if isinstance(model, MixedQwen3ForCausalLM) else None

    def _rlk_rank(self, model: RlkQwen3ForCausalLM) -> dict[str, Any]:
        """This rank's place and what it alone holds: canonical shards, hash of its weights; transport, and traffic since the start."""
        tp, parts = model.dense.tp, model.dense.parts()
        shards = owned(tp.size, tp.rank, model.dense.numerics.canonical_tp)
        sent = {"transport": tp.link.transport, "traffic": tp.link.traffic.rows()} if tp.size > 1 else {"transport": "", "traffic": []}
        device = str(model.dense.embedding.device)
        return {"rank": tp.rank, "device": device, "shards": list(shards), "shard_hash": model_hash(parts), **sent}

    def _rlk_weights_hash(self) -> str | None:
        model = self.model_runner.get_model()
        return model_hash(model.dense.hf_tensors()) if isinstance(model, RlkQwen3ForCausalLM) else None

    def _rlk_confirm(self, path: str, found: str) -> str:
        live = self._rlk_weights_hash() or found
        if live != found:
            raise EngineRefusal(f"{path}: live weights hash to {live}, the files to {found}: restart the engine")
        return live

    def _rlk_kernels(self) -> list[dict[str, str | int]]:
        result: list[dict[str, str | int]] = []
        for ran in dispatch.readback():
            calls = ran.calls - self._rlk_before.get((ran.op, ran.backend, ran.kernel_id), 0)
            if calls:
                result.append({"op": ran.op, "backend": ran.backend, "kernel_id": ran.kernel_id, "calls": calls})
        return result


def _name(thing: object) -> str:
    kind = type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _subnormals_kept(device: torch.device) -> bool:
    """Halve the smallest normal fp32 number, in enough elements to reach every thread: flush to zero would give 0."""
    smallest = torch.full((1 << 20,), torch.finfo(torch.float32).tiny, device=device)
    return bool((smallest * 0.5 != 0).all())
