"""The strict trainer model: builds Megatron's GPTModel from the strict modules, scores with it and runs its backward."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rlk.contract.numerics import Numerics
from rlk.contract.settings import require_settings
from rlk.kernels.logp import logp, support_mask
from rlk.kernels.rope import rope_table
from rlk.model.config import Qwen3Config
from rlk.model.trace import Trace
from rlk.train import parameters
from rlk.train.batch import MicroBatch
from rlk.train.megatron import Seeds, megatron_settings
from rlk.train.modules import StrictAttention, StrictColumn, StrictConfig, StrictGPT, StrictHeadNorm, StrictLayer, StrictNorm, StrictRow
from rlk.train.tokens import Tokens


class NonFiniteError(ArithmeticError):
    """The model produced NaN or Inf; the message names the first row."""


def _block(config: StrictConfig) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer.module = StrictLayer
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = StrictNorm
    attention = parts.self_attention.submodules
    attention.linear_qkv, attention.linear_proj = StrictColumn, StrictRow
    attention.q_layernorm = attention.k_layernorm = StrictHeadNorm
    attention.core_attention = StrictAttention
    parts.mlp.submodules.linear_fc1, parts.mlp.submodules.linear_fc2 = StrictColumn, StrictRow
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=StrictNorm)


class StrictModel:
    """Megatron's GPTModel on the strict operators; parameters by packed name, in model order."""

    def __init__(self, config: Qwen3Config, numerics: Numerics, packed: Mapping[str, torch.Tensor]) -> None:
        self.config, self.numerics, self.tokens = config, numerics, Tokens()
        table = rope_table(config.head_dim, config.rope_theta, config.max_position_embeddings)
        settings = StrictConfig(**megatron_settings(config), model=config, numerics=numerics, table=table, tokens=self.tokens)
        require_settings(
            {
                "sequence_parallel": settings.sequence_parallel,
                "pipeline_parallel": settings.pipeline_model_parallel_size > 1,
            }
        )
        self.module = StrictGPT(
            config=settings,
            transformer_layer_spec=_block(settings),
            vocab_size=config.padded_vocab(numerics),
            max_sequence_length=config.max_position_embeddings,
            position_embedding_type="none",
            share_embeddings_and_output_weights=False,
        )
        self.parameters = parameters.named_parameters(self.module, packed)
        parameters.load(self.parameters, packed)
        parameters.prepare_gradients(self.parameters)

    def from_packed(self, packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Packed tensors in the layout of the parameters: the same."""
        return dict(packed)

    to_packed = from_packed

    def score(self, batch: MicroBatch, trace: Trace | None = None) -> list[float]:
        """Logprob of every target, fp32 values."""
        with torch.no_grad(), self.tokens.use(batch, trace):
            values: list[float] = self._logp(batch)[batch.rows].tolist()
        return values

    def accumulate(self, batch: MicroBatch, seeds: Seeds) -> None:
        """Score with gradients, ask ``seeds`` for dL/dlogp of every target, and fold the weight gradients into the main gradients."""
        with self.tokens.use(batch):
            scores = self._logp(batch)
            seed = torch.zeros_like(scores)
            seed[batch.rows] = torch.tensor(seeds(scores.detach()[batch.rows].tolist()), dtype=torch.float32)
            scores.backward(seed)
            self.tokens.require_gradients(self.parameters)

    def _logp(self, batch: MicroBatch) -> torch.Tensor:
        """fp32 [T]: logprob of the next token in the rows that predict a response token, +0 in the others."""
        longest = int((batch.cu_seqlens[1:] - batch.cu_seqlens[:-1]).max())
        packed = PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=batch.cu_seqlens, cu_seqlens_kv=batch.cu_seqlens, max_seqlen_q=longest, max_seqlen_kv=longest
        )
        logits = self.module(batch.ids[None], batch.positions[None], None, packed_seq_params=packed)[0]
        bad = (~torch.isfinite(logits)).any(dim=-1).nonzero()
        if bad.numel():
            raise NonFiniteError(f"logits of packed row {int(bad[0])} are not finite: trace the samples to find where it begins")
        active = torch.zeros(batch.tokens, dtype=torch.bool)
        active[batch.rows] = True
        targets = torch.zeros(batch.tokens, dtype=torch.int64)
        targets[batch.rows] = batch.targets
        temperature = torch.ones(batch.tokens)
        temperature[batch.rows] = batch.temperature
        result = logp(
            logits,
            targets,
            temperature,
            vocab_size=self.config.vocab_size,
            padded_vocab=self.config.padded_vocab(self.numerics),
            shards=self.numerics.canonical_tp,
            vocab_tile=self.numerics.vocab_tile,
            support=self._support(batch, logits.shape[1]),
            active=active,
        )
        trace = self.tokens.trace
        if trace is not None:
            trace.put("logits", logits[:, : self.config.vocab_size])
            trace.put("logp", result)
        return result

    def _support(self, batch: MicroBatch, width: int) -> torch.Tensor | None:
        """bool [T, width] if any target's support is truncated, else None."""
        if all(kept is None for kept in batch.supports):
            return None
        rows: list[tuple[int, ...] | None] = [None] * batch.tokens
        for row, kept in zip(batch.rows.tolist(), batch.supports):
            rows[row] = kept
        return support_mask(rows, self.config.vocab_size, width=width)
