"""Megatron's layers computing with this project's operators.

Each class keeps the Megatron class's construction, parameters and place in the model, and replaces what it computes. Operators get
detached weights, so autograd sees activations only; weight gradients go through :class:`rlk.train.tokens.Tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from rlk.contract.numerics import Numerics
from rlk.kernels.attention import attention
from rlk.kernels.det_gemm import det_gemm_weight_grad
from rlk.kernels.embedding import embedding_weight_grad
from rlk.kernels.lm_head import lm_head_weight_grad
from rlk.kernels.qk_norm import qk_norm, qk_norm_shard_gamma_grads
from rlk.kernels.rms_norm import rms_norm, rms_norm_gamma_grad
from rlk.kernels.rope import rope_table
from rlk.model.config import Qwen3Config
from rlk.model.linear import column, output, row, vocabulary_embedding
from rlk.model.qwen3 import LayerOps, decoder_layer
from rlk.parallel.state import Parallel
from rlk.train.batch import MicroBatch
from rlk.train.context import ContextAttention
from rlk.train.megatron import megatron_settings
from rlk.train.tokens import LayoutError, Tokens


@dataclass
class StrictConfig(TransformerConfig):
    """Megatron's configuration and what the strict modules need beside it: architecture, numerics, rope table, tokens in flight,
    this rank's place."""

    model: Qwen3Config = field(kw_only=True)
    numerics: Numerics = field(kw_only=True)
    table: torch.Tensor = field(kw_only=True)
    tokens: Tokens = field(kw_only=True)
    parallel: Parallel = field(kw_only=True)


def strict_settings(config: Qwen3Config, numerics: Numerics, tokens: Tokens, parallel: Parallel, device: torch.device) -> StrictConfig:
    """The configuration of a model whose modules are strict, all or some; its rope table is on ``device``."""
    table = rope_table(config.head_dim, config.rope_theta, config.max_position_embeddings).to(device)
    settings = megatron_settings(config, parallel.topology, device)
    return StrictConfig(**settings, model=config, numerics=numerics, table=table, tokens=tokens, parallel=parallel)


class StrictNorm(torch.nn.RMSNorm):
    """RMSNorm of hidden states, [T, 1, H] or [T, H]; the class that Megatron's local layers use is the base."""

    def __init__(self, config: StrictConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.tokens, self.epsilon = config.tokens, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = rms_norm(x, self.weight.detach(), self.epsilon)
        rows = x.detach().flatten(0, -2)

        def gradient(batch, dy):  # type: ignore[no-untyped-def]
            return rms_norm_gamma_grad(rows, dy.flatten(0, -2), self.epsilon, batch.leaf_index, batch.leaf_offsets)

        self.tokens.on_gradient(y, self.weight, gradient)
        return y


class StrictHeadNorm(torch.nn.RMSNorm):
    """RMSNorm of query or key heads, [T, heads, D]; its gradient has one accumulator per canonical shard of heads."""

    def __init__(self, config: StrictConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.tokens, self.epsilon, self.shards = config.tokens, eps, len(config.parallel.shards)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = qk_norm(x, self.weight.detach(), self.epsilon)
        heads = x.detach()

        def gradient(batch, dy):  # type: ignore[no-untyped-def]
            return qk_norm_shard_gamma_grads(heads, dy, self.epsilon, batch.leaf_index, batch.leaf_offsets, self.shards)

        self.tokens.on_gradient(y, self.weight, gradient, per_shard=True)
        return y


class StrictColumn(ColumnParallelLinear):
    """Output-split linear, [T, K] -> [T, N of this rank]: plain order forward, split order for the input gradient."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
        parallel = self.config.parallel
        y = column(input, weight.detach(), len(parallel.shards), parallel.tp)
        x = input.detach()
        self.config.tokens.on_gradient(y, weight, lambda batch, dy: det_gemm_weight_grad(x, dy, batch.leaf_index, batch.leaf_offsets))
        return y


class StrictRow(RowParallelLinear):
    """Input-split linear, [T, K of this rank] -> [T, N]: split order forward, plain order for the input gradient."""

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, None]:
        parallel = self.config.parallel
        y = row(input_, self.weight.detach(), len(parallel.shards), parallel.tp)
        x = input_.detach()
        self.config.tokens.on_gradient(y, self.weight, lambda batch, dy: det_gemm_weight_grad(x, dy, batch.leaf_index, batch.leaf_offsets))
        return y, None


class StrictEmbedding(VocabParallelEmbedding):
    """Word embedding, ids [1, T] -> [1, T, H]; an id outside the real vocabulary raises IndexError."""

    def __init__(self, *arguments: Any, config: StrictConfig, **keywords: Any) -> None:
        super().__init__(*arguments, config=config, **keywords)
        self.tokens, self.vocab_size, self.parallel = config.tokens, config.model.vocab_size, config.parallel

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        ids = input_.reshape(-1)
        y = vocabulary_embedding(ids, self.weight.detach(), self.vocab_size, self.parallel.tp)
        if torch.is_grad_enabled():
            y.requires_grad_()
        rows, first = self.weight.shape[0], self.parallel.tp.rank * self.weight.shape[0]

        def gradient(batch, dy):  # type: ignore[no-untyped-def]
            index = batch.leaf_index
            if self.parallel.tp.size > 1:
                elsewhere = (ids[index] // rows != self.parallel.tp.rank) | (index < 0)
                index = index.masked_fill(elsewhere, -1)
            return embedding_weight_grad(ids - first, dy, index, batch.leaf_offsets, rows)

        self.tokens.on_gradient(y, self.weight, gradient)
        if self.tokens.trace is not None:
            self.tokens.trace.put("embedding", y)
        return y.unsqueeze(0)


class StrictOutput(ColumnParallelLinear):
    """Output layer, [T, 1, H] -> fp32 logits [rows, 1, columns of this rank] of the rows that are scored, of all T while a trace is on:
    plain order, input gradient over the vocabulary shards. A row without logits has no loss: it adds +0 to every gradient."""

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **_: Any) -> torch.Tensor:
        every = input.squeeze(1)
        tokens, parallel = self.config.tokens, self.config.parallel
        batch = tokens.batch(len(every))
        h = every if tokens.trace is not None else _Picked.apply(every, batch.scored)
        y = output(h, weight.detach(), len(parallel.shards), parallel.tp)
        rows = h.detach()

        def gradient(batch, dy):  # type: ignore[no-untyped-def]
            return lm_head_weight_grad(rows, dy.bfloat16(), batch.scored_index, batch.scored_offsets)

        tokens.on_gradient(y, weight, gradient, rows=len(every))
        if tokens.trace is not None:
            tokens.trace.put("final_norm", rows)
        return y.unsqueeze(1)


class _Picked(torch.autograd.Function):
    """Rows of x; the others have gradient +0. Rows are copied there, never added to zeros, which would lose a −0."""

    @staticmethod
    def forward(ctx, x, rows):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x[rows]

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (rows,) = ctx.saved_tensors
        dx = dy.new_zeros(ctx.shape)
        dx[rows] = dy
        return dx, None


class StrictAttention(MegatronModule):
    """Core attention over packed samples: q [T, Hq, D], k and v [T, Hk, D] -> [T, Hq·D]."""

    def __init__(self, config: StrictConfig, **_: Any) -> None:
        super().__init__(config=config)

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        numerics = self.config.numerics
        scale = self.config.model.attention_scale
        if batch.context is not None:
            result: torch.Tensor = ContextAttention.apply(q, k, v, batch.context, self.config.parallel.cp, scale, numerics)
            return result.flatten(1)
        return attention(
            q, k, v, batch.cu_seqlens, scale=scale, kv_tile=numerics.kv_tile, kv_split=numerics.kv_split,
            backend=numerics.attention_backend(q.device.type),
        ).flatten(1)  # fmt: skip


def layer_ops(layer: TransformerLayer, batch: MicroBatch) -> LayerOps:
    """What a layer's own submodules compute, over the packed rows of ``batch``."""
    block, mlp = layer.self_attention, layer.mlp
    return LayerOps(
        input_norm=layer.input_layernorm,
        qkv=lambda x: block.linear_qkv(x)[0],
        q_norm=block.q_layernorm,
        k_norm=block.k_layernorm,
        attend=lambda q, k, v: block.core_attention(q, k, v, batch),
        o_proj=lambda x: block.linear_proj(x)[0],
        post_norm=layer.pre_mlp_layernorm,
        gate_up=lambda x: mlp.linear_fc1(x)[0],
        down_proj=lambda x: mlp.linear_fc2(x)[0],
    )


class StrictLayer(TransformerLayer):
    """Megatron's transformer layer whose forward is the project's one decoder layer, run on this layer's own submodules."""

    def forward(self, hidden_states: torch.Tensor, *, packed_seq_params: PackedSeqParams, **_: Any) -> tuple[torch.Tensor, None]:
        config: StrictConfig = self.config
        batch = config.tokens.batch(hidden_states.shape[0])
        if packed_seq_params.cu_seqlens_q is not batch.cu_seqlens:
            raise LayoutError("packed_seq_params belong to another micro-batch than the token layout: build both from one")
        x = hidden_states.squeeze(1)
        prefix = f"layers.{self.layer_number - 1}."
        ops = layer_ops(self, batch)
        y = decoder_layer(x, ops, batch.positions, config.table, config.model, config.numerics, config.tokens.trace, prefix)
        return y.unsqueeze(1), None


class StrictGPT(GPTModel):
    """Megatron's GPTModel with the strict embedding and output layer in place of its own."""

    def __init__(self, config: StrictConfig, **keywords: Any) -> None:
        super().__init__(config=config, **keywords)
        self.embedding.word_embeddings = StrictEmbedding(
            self.vocab_size, config.hidden_size, config=config, init_method=config.init_method, tp_group=self.pg_collection.tp
        )
        self.output_layer = strict_output(self)


def strict_output(model: GPTModel) -> StrictOutput:
    """The strict output layer of a model, to be put in the place of its own."""
    config: StrictConfig = model.config
    return StrictOutput(
        config.hidden_size, model.vocab_size, bias=False, skip_bias_add=False, gather_output=not model.parallel_output, config=config,
        init_method=config.init_method, tp_group=model.pg_collection.tp,
    )  # fmt: skip
