"""vLLM's worker for a strict or a mixed model, with the strict sampler in its runner where the draw is this project's.

``worker_cpu`` and ``worker_cuda`` name its base."""

from __future__ import annotations

from rlk.contract.numerics import Numerics
from rlk.model.config import Qwen3Config
from rlk.rollout.vllm.extension import WorkerExtension
from rlk.rollout.vllm.mixed import MixedQwen3ForCausalLM
from rlk.rollout.vllm.model import RlkQwen3ForCausalLM
from rlk.rollout.vllm.plugin import register
from rlk.rollout.vllm.sampler import StrictSampler
from rlk.rollout.vllm.settings import EngineRefusal, carried_routes, numerics_of, require_supported


class StrictWorkerMixin(WorkerExtension):
    """Stands before vLLM's worker among the bases. Refuses an unsupported configuration before any weight is read."""

    def init_device(self) -> None:
        register()
        config = require_supported(self.vllm_config)
        super().init_device()  # type: ignore[misc]
        if "logp" in carried_routes(self.vllm_config):
            self.model_runner.sampler = self.strict_sampler(config, numerics_of(self.vllm_config))

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)  # type: ignore[misc]
        model, sampler = self.model_runner.get_model(), self.model_runner.sampler
        if isinstance(model, MixedQwen3ForCausalLM):
            model.log.watch("logp", sampler)
        elif isinstance(model, RlkQwen3ForCausalLM):
            model.recorder = sampler.recorder
        else:
            raise EngineRefusal(f"vLLM built {type(model).__module__}.{type(model).__qualname__} instead of the strict model")

    def strict_sampler(self, config: Qwen3Config, numerics: Numerics) -> StrictSampler:
        """What draws the tokens on this device."""
        raise NotImplementedError
