"""The one Qwen3 forward pass as a vLLM model: this rank's shards of the weights, attention over vLLM's paged cache."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import cast

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention

from rlk.contract.numerics import Numerics
from rlk.kernels.checked import trusted
from rlk.model.config import CheckpointError, Qwen3Config
from rlk.model.linear import joined
from rlk.model.qwen3 import Qwen3Dense, Qwen3Layer
from rlk.model.serving import serve
from rlk.rollout.vllm.attention import RlkAttentionBackend
from rlk.rollout.vllm.ranks import tensor_parallel
from rlk.rollout.vllm.settings import device_of, numerics_of, require_supported, transport_of
from rlk.rollout.vllm.tracing import StepRecorder


class RlkQwen3ForCausalLM(nn.Module):
    """Qwen3 dense behind vLLM's model interface; ids and positions are integers [T], rows of all scheduled requests packed.

    Ids and positions are taken at their word: the engine refuses a prompt that holds a wrong id or is too long before vLLM sees it.
    recorder: set by the worker; collects intermediates while a trace is on.
    """

    recorder: StepRecorder | None = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config, numerics = require_supported(vllm_config), numerics_of(vllm_config)
        tp = tensor_parallel(numerics, transport_of(vllm_config))
        self.dense = Qwen3Dense(config, numerics, max_positions=vllm_config.model_config.max_model_len, tp=tp)
        layers = range(config.num_hidden_layers)
        self.attention = nn.ModuleList(paged_layer(vllm_config, config, numerics, tp.size, f"{prefix}layers.{i}.attention") for i in layers)

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Part of vLLM's interface; embeddings are never fed in from outside, so nothing may call it."""
        raise NotImplementedError("strict mode takes token ids, not embeddings: send prompt_token_ids")

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: object = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T] ids and positions -> final-norm hidden states [T, H] bf16. A trace takes each operator alone, else some are fused."""
        if intermediate_tensors is not None or inputs_embeds is not None:
            raise NotImplementedError("strict mode runs the whole model on token ids: no pipeline stage, no input embeddings")
        trace = self.recorder.begin(positions) if self.recorder else None
        with self._agreed(input_ids, positions), trusted():
            if trace is not None:
                return self.dense(input_ids.long(), positions.long(), self._attend, trace)
            positions = positions.long()
            return serve(self.dense, input_ids.long(), lambda layer, qkv: self._attend_packed(layer, qkv, positions))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, H] -> fp32 logits, one row per scheduled request, padding included: of this rank's vocabulary shards on the CPU, of all
        ranks' on a card, where every rank draws."""
        columns = self.dense.columns(hidden_states)
        if columns.is_cuda:
            columns = joined(columns, self.dense.tp)
        if self.recorder:
            self.recorder.put_last_rows("logits", columns[:, : self.dense.config.vocab_size])
        return columns

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take a whole checkpoint by HF name, in place, so that captured graphs stay valid.

        CheckpointError on a tensor that is missing, extra, given twice, misshapen or not bf16.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in tensors:
                raise CheckpointError(f"tensor {name} arrived twice: give every tensor once")
            if tensor.dtype != torch.bfloat16:
                raise CheckpointError(f"tensor {name} is {tensor.dtype}: the contract stores bf16 weights")
            tensors[name] = tensor
        self.dense.load_hf(tensors)
        return {name for name, _ in self.named_parameters()}

    def _agreed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> AbstractContextManager[None]:
        """The step as a unit of all ranks; on a card, whose host must not wait, vLLM's word that it hands them one step is taken."""
        tp = self.dense.tp
        if tp.size == 1 or input_ids.is_cuda:
            return nullcontext()
        return tp.link.unit("forward", repr((input_ids.tolist(), positions.tolist())))

    def _attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        attended: torch.Tensor = self.attention[layer](q, k, v)
        return attended

    def _attend_packed(self, layer: int, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return attend_packed(cast(Attention, self.attention[layer]), cast(Qwen3Layer, self.dense.layers[layer]), self.dense, qkv, positions)


def paged_layer(vllm_config: VllmConfig, config: Qwen3Config, numerics: Numerics, ranks: int, prefix: str) -> Attention:
    """One layer's attention over vLLM's paged cache, for one of ``ranks`` that divide the heads."""
    device = device_of(vllm_config)
    return Attention(
        config.num_attention_heads // ranks,
        config.head_dim,
        config.attention_scale,
        num_kv_heads=config.num_key_value_heads // ranks,
        cache_config=vllm_config.cache_config,
        prefix=prefix,
        attn_backend=_attention_backend(device),
        kv_tile=numerics.kv_tile,
        kv_split=numerics.kv_split,
        backend=numerics.attention_backend(device),
    )


def attend_packed(attention: Attention, weights: Qwen3Layer, dense: Qwen3Dense, qkv: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """qkv [T, groups·(g+2)·D] before q/k norm, positions int64 [T] -> attention's output [T, Hq·D]."""
    attended: torch.Tensor = attention.impl.attend_packed(
        attention, qkv, positions, weights.q_norm, weights.k_norm, dense.config.rms_norm_eps, dense.rope_table
    )
    return attended


def _attention_backend(device: str) -> type[RlkAttentionBackend]:
    name = {"cpu": "CpuAttentionBackend", "cuda": "CudaAttentionBackend"}[device]
    backend: type[RlkAttentionBackend] = getattr(importlib.import_module(f"rlk.rollout.vllm.attention_{device}"), name)
    return backend
