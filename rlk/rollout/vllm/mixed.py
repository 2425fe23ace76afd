"""vLLM's own Qwen3 in which some routes run this project's operators: the rollout engine of the ablation's mixed arms.

The stock model is built whole and loads its weights as ever. The modules of a route that is this project's stay in their place with another
``forward``, which computes on packed weights beside them; operators, their order and rounding are those of ``rlk.model``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from rlk.kernels.checked import trusted
from rlk.kernels.rms_norm import rms_norm
from rlk.kernels.serving import add_rms_norm
from rlk.model.qwen3 import LayerOps, Qwen3Dense, Qwen3Layer, feed_forward
from rlk.model.routes import RouteLog
from rlk.rollout.vllm.model import attend_packed, paged_layer
from rlk.rollout.vllm.settings import carried_routes, numerics_of, require_supported


class MixedQwen3ForCausalLM(Qwen3ForCausalLM):
    """dense: the packed weights. log: what ran in each route; the worker adds its sampler."""

    dense: Qwen3Dense

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        config, numerics, routes = require_supported(vllm_config), numerics_of(vllm_config), carried_routes(vllm_config)
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        dense = Qwen3Dense(config, numerics, max_positions=vllm_config.model_config.max_model_len)
        # Past torch's register of submodules: vLLM's loader must neither fill nor move these weights.
        self.__dict__["dense"] = dense
        self.log = RouteLog()
        for layer, weights in zip(self.model.layers, dense.decoder_layers(), strict=True):
            ops, block = weights.ops(_no_attention, config, numerics), layer.self_attn
            if "attention" in routes:
                name = block.attn.layer_name
                del vllm_config.compilation_config.static_forward_context[name]
                block.attn = paged_layer(vllm_config, config, numerics, 1, name)
                block.forward = _attention(block.attn, weights, ops, dense)
                layer.input_layernorm.forward = _norm(weights.input_norm, config.rms_norm_eps)
            if "ffn" in routes:
                layer.mlp.forward = _ffn(ops, dense)
                layer.post_attention_layernorm.forward = _norm(weights.post_norm, config.rms_norm_eps)
            self.log.watch("attention", layer.input_layernorm, block)
            self.log.watch("ffn", layer.post_attention_layernorm, layer.mlp)
        if "logp" in routes:
            self.model.norm.forward = _norm(dense.final_norm, config.rms_norm_eps)
            self.logits_processor.forward = _logits(dense)
        self.log.watch("logp", self.model.norm, self.logits_processor)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, intermediate_tensors: None = None, inputs_embeds: None = None
    ) -> torch.Tensor:
        """[T] ids and positions, which the engine has checked -> hidden states [T, H] after the final norm."""
        with trusted():
            hidden: torch.Tensor = super().forward(input_ids, positions, intermediate_tensors, inputs_embeds)
            return hidden

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Give a whole checkpoint to vLLM's loader and, by the same names, to the packed weights."""
        tensors = dict(weights)
        self.dense.load_hf(tensors)
        loaded: set[str] = super().load_weights(tensors.items())
        return loaded


def _norm(gamma: torch.Tensor, eps: float) -> Callable[..., torch.Tensor | tuple[torch.Tensor, torch.Tensor]]:
    def normed(x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return rms_norm(x, gamma, eps)
        total, y = add_rms_norm(x, residual, gamma, eps)
        return y, total

    return normed


def _attention(attention: Attention, weights: Qwen3Layer, ops: LayerOps, dense: Qwen3Dense) -> Callable[..., torch.Tensor]:
    def attend(positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        return ops.o_proj(attend_packed(attention, weights, dense, ops.qkv(hidden_states), positions.long()))

    return attend


def _ffn(ops: LayerOps, dense: Qwen3Dense) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: feed_forward(x, ops, dense.config, dense.numerics)


def _logits(dense: Qwen3Dense) -> Callable[..., torch.Tensor]:
    return lambda lm_head, hidden_states, embedding_bias=None: dense.columns(hidden_states)


def _no_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("attention over pages is not one of a layer's operators here: call attend_packed")
