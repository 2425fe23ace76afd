"""vLLM's worker with the strict sampler in its runner and the extension's methods; ``worker_cpu`` and ``worker_cuda`` name its base."""

from __future__ import annotations

from rlk.contract.numerics import Numerics
from rlk.model.config import Qwen3Config
from rlk.rollout.vllm.extension import WorkerExtension
from rlk.rollout.vllm.model import RlkQwen3ForCausalLM
from rlk.rollout.vllm.plugin import register
from rlk.rollout.vllm.sampler import StrictSampler
from rlk.rollout.vllm.settings import EngineRefusal, numerics_of, require_supported


class StrictWorkerMixin(WorkerExtension):
    """Stands before vLLM's worker among the bases. Refuses an unsupported configuration before any weight is read."""

    def init_device(self) -> None:
        register()
        config = require_supported(self.vllm_config)
        super().init_device()  # type: ignore[misc]
        self.model_runner.sampler = self.strict_sampler(config, numerics_of(self.vllm_config))

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights=load_dummy_weights)  # type: ignore[misc]
        model = self.model_runner.get_model()
        if not isinstance(model, RlkQwen3ForCausalLM):
            raise EngineRefusal(f"vLLM built {type(model).__module__}.{type(model).__qualname__} instead of the strict model")
        model.recorder = self.model_runner.sampler.recorder

    def strict_sampler(self, config: Qwen3Config, numerics: Numerics) -> StrictSampler:
        """What draws the tokens on this device."""
        raise NotImplementedError
