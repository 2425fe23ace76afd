"""vLLM's CPU worker with the strict sampler in its runner and the extension's methods."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from rlk.rollout.vllm.extension import WorkerExtension
from rlk.rollout.vllm.model import RlkQwen3ForCausalLM
from rlk.rollout.vllm.ranks import tensor_parallel
from rlk.rollout.vllm.sampler import StrictSampler
from rlk.rollout.vllm.settings import EngineRefusal, numerics_of, require_supported


class StrictWorker(CPUWorker, WorkerExtension):
    """Refuses an unsupported configuration before any weight is read."""

    def init_device(self) -> None:
        config = require_supported(self.vllm_config)
        super().init_device()
        numerics = numerics_of(self.vllm_config)
        self.model_runner.sampler = StrictSampler(self.model_runner, config, numerics, tensor_parallel(numerics))

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)
        model = self.model_runner.get_model()
        if not isinstance(model, RlkQwen3ForCausalLM):
            raise EngineRefusal(f"vLLM built {type(model).__module__}.{type(model).__qualname__} instead of the strict model")
        model.recorder = self.model_runner.sampler.recorder
