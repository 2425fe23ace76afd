"""The strict worker on a card: counts the replays of every captured graph."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu_worker import Worker

from rlk.contract.numerics import Numerics
from rlk.model.config import Qwen3Config
from rlk.rollout.vllm.sampler import StrictSampler
from rlk.rollout.vllm.sampler_cuda import DeviceStrictSampler
from rlk.rollout.vllm.worker import StrictWorkerMixin


class CountedGraph:
    """A captured graph that counts how often it was replayed."""

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph, self.replays = graph, 0

    def replay(self) -> None:
        self.replays += 1
        self._graph.replay()


class StrictCudaWorker(StrictWorkerMixin, Worker):
    """Draws on the card."""

    def strict_sampler(self, config: Qwen3Config, numerics: Numerics) -> StrictSampler:
        most = self.vllm_config.scheduler_config.max_num_seqs
        return DeviceStrictSampler(self.model_runner, config, numerics, max_rows=most)

    def determine_available_memory(self) -> int:
        """Also gives back what loading the weights and vLLM's trial step left, which would lie between the pages of the KV cache."""
        available: int = super().determine_available_memory()
        torch.cuda.empty_cache()
        return available

    def compile_or_warm_up_model(self) -> Any:
        """Also compiles what a prompt needs: vLLM itself only runs prompts without attention before the first request. At the end a step
        of the most tokens makes the blocks of memory that every smaller step reuses."""
        budget = self.vllm_config.scheduler_config.max_num_batched_tokens
        most = min(budget, self.vllm_config.model_config.max_model_len)
        for rows in sorted({min(most, rows) for rows in (2, 64, 512, 2048, most)}, reverse=True):
            self.model_runner._dummy_run(rows, force_attention=True, skip_eplb=True, is_profile=True)
        times = super().compile_or_warm_up_model()
        torch.cuda.empty_cache()
        self.model_runner._dummy_run(budget, skip_eplb=True, is_profile=True)
        for entry in getattr(self.model_runner.model, "concrete_cudagraph_entries", {}).values():
            entry.cudagraph = CountedGraph(entry.cudagraph)
        return times
