"""Megatron's own model in which some routes run this project's operators: the trainer of the ablation's mixed arms.

The stock layers and the native model's path through them stay; a route of this project's has the strict modules in its places, and its
attention or MLP another ``forward``. Samples are scored one after another, since stock attention takes no packed samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel

from rlk.contract.arms import Route
from rlk.contract.numerics import Numerics
from rlk.model.config import Qwen3Config
from rlk.model.qwen3 import feed_forward, self_attention
from rlk.model.routes import RouteLog
from rlk.parallel.state import Parallel
from rlk.train.batch import MicroBatch, Sample, micro_batch
from rlk.train.megatron import CPU, Seeds
from rlk.train.modules import StrictConfig, StrictNorm, layer_ops, strict_output, strict_settings
from rlk.train.native import NativeModel, native_logp
from rlk.train.scoring import Scoring, require_finite
from rlk.train.strict import strict_layer
from rlk.train.tokens import Tokens

_ROUTE_OF = {
    "input_norm": "attention", "qkv": "attention", "q_norm": "attention", "k_norm": "attention", "o_proj": "attention",
    "post_norm": "ffn", "gate_up": "ffn", "down_proj": "ffn", "final_norm": "logp", "lm_head": "logp", "embedding": "",
}  # fmt: skip
"""The route that computes with a packed weight."""


class MixedModel(NativeModel):
    """routes: those of this project's operators. log: what ran in each route; kernels of backward passes are counted under "backward"."""

    named = "a mixed model"

    def __init__(
        self,
        config: Qwen3Config,
        numerics: Numerics,
        packed: Mapping[str, torch.Tensor],
        parallel: Parallel,
        device: torch.device = CPU,
        *,
        routes: Sequence[Route],
    ) -> None:
        self.routes, self.tokens, self.log = tuple(routes), Tokens(parallel), RouteLog()
        self.scoring = Scoring(config.vocab_size, config.padded_vocab(numerics), numerics, parallel)
        super().__init__(config, numerics, packed, parallel, device)
        self._own = {name: parameter for name, parameter in self.parameters.items() if self._computed(name)}

    def accumulate(self, batch: MicroBatch, seeds: Seeds) -> None:
        """Score with gradients, ask ``seeds`` for dL/dlogp of every target, and add the gradients, sample by sample, to the main gradients:
        this project's as the strict model folds them, autograd's bf16 ones as the native model does."""
        with torch.no_grad():
            slopes = seeds(self._scores(batch)).float()
        for sample, slope in zip(batch.samples, slopes.split([len(sample.response.token_ids) for sample in batch.samples])):
            with self.tokens.use(self._alone(sample)):
                scores = self._logp(sample)
                with self.log.of("backward"):
                    scores.backward(slope)
                    self.tokens.join()
                self.tokens.require_gradients(self._own)
            for name, parameter in self.parameters.items():
                if name not in self._own:
                    parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
                    parameter.grad = None

    def _scores(self, batch: MicroBatch) -> torch.Tensor:
        scores = []
        for sample in batch.samples:
            with self.tokens.use(self._alone(sample)):
                scores.append(self._logp(sample))
        return torch.cat(scores)

    def _alone(self, sample: Sample) -> MicroBatch:
        return micro_batch((sample,), self.numerics).to(self.device)

    def _logp(self, sample: Sample) -> torch.Tensor:
        logits = self._logits(sample)
        with self.log.of("logp"):
            if "logp" not in self.routes:
                return native_logp(sample, logits[:, : self.config.vocab_size].float())
            batch = self.tokens.batch(len(sample.ids))
            scores, bad = self.scoring.rows(batch, logits)
            require_finite(bad)
            return self.scoring.of_targets(batch, scores)

    def _computed(self, name: str) -> bool:
        return _ROUTE_OF[name.rpartition(".")[2]] in self.routes

    def _gated(self, name: str) -> bool:
        return super()._gated(name) and not self._computed(name)

    def _module(self) -> GPTModel:
        config = self.config
        settings = strict_settings(config, self.numerics, self.tokens, self.parallel, self.device)
        module = self._stock(settings, strict_layer(self.routes))
        for layer in module.decoder.layers:
            if "attention" in self.routes:
                layer.self_attention.forward = _attention(layer, settings)
            if "ffn" in self.routes:
                layer.mlp.forward = _ffn(layer, settings)
            self.log.watch("attention", layer.input_layernorm, layer.self_attention)
            self.log.watch("ffn", layer.pre_mlp_layernorm, layer.mlp)
        if "logp" in self.routes:
            module.decoder.final_layernorm = StrictNorm(settings, config.hidden_size, config.rms_norm_eps)
            module.output_layer = strict_output(module)
        self.log.watch("logp", module.decoder.final_layernorm, module.output_layer)
        return module


Added = tuple[torch.Tensor, None]
"""[T, 1, H], what a block adds to the residual, and Megatron's bias."""


def _attention(layer: Any, config: StrictConfig) -> Callable[..., Added]:
    def attend(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Added:
        batch = config.tokens.batch(hidden_states.shape[0])
        x, ops = hidden_states.squeeze(1), layer_ops(layer, batch)
        return self_attention(x, ops, batch.positions, config.table, config.model).unsqueeze(1), None

    return attend


def _ffn(layer: Any, config: StrictConfig) -> Callable[..., Added]:
    def feed(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Added:
        x, batch = hidden_states.squeeze(1), config.tokens.batch(hidden_states.shape[0])
        return feed_forward(x, layer_ops(layer, batch), config.model, config.numerics).unsqueeze(1), None

    return feed
