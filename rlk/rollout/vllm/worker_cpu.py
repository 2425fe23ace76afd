"""The strict worker on the CPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from rlk.contract.numerics import Numerics
from rlk.model.config import Qwen3Config
from rlk.rollout.vllm.ranks import tensor_parallel
from rlk.rollout.vllm.sampler import HostSampler, StrictSampler
from rlk.rollout.vllm.settings import transport_of
from rlk.rollout.vllm.worker import StrictWorkerMixin


class StrictCpuWorker(StrictWorkerMixin, CPUWorker):
    """Draws on the host."""

    def strict_sampler(self, config: Qwen3Config, numerics: Numerics) -> StrictSampler:
        return HostSampler(self.model_runner, config, numerics, tensor_parallel(numerics, transport_of(self.vllm_config)))
