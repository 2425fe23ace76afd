"""The strict trainer model: builds Megatron's GPTModel from the strict modules, scores with it and runs its backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from rlk.contract.arms import ROUTES, Route
from rlk.contract.numerics import Numerics
from rlk.contract.settings import require_settings
from rlk.kernels.checked import trusted
from rlk.model import shards
from rlk.model.config import Qwen3Config
from rlk.model.trace import Trace
from rlk.parallel.state import Parallel
from rlk.train import parameters
from rlk.train.batch import MicroBatch
from rlk.train.megatron import CPU, Seeds
from rlk.train.modules import (
    StrictAttention,
    StrictColumn,
    StrictConfig,
    StrictGPT,
    StrictHeadNorm,
    StrictLayer,
    StrictNorm,
    StrictRow,
    strict_settings,
)
from rlk.train.scoring import Scoring, require_finite, require_ids
from rlk.train.tokens import Tokens


def strict_layer(routes: Sequence[Route] = ROUTES) -> ModuleSpec:
    """Megatron's local layer with the strict modules in the places of these routes; its forward is its own."""
    layer = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    parts = layer.submodules
    if "attention" in routes:
        parts.input_layernorm = StrictNorm
        attention = parts.self_attention.submodules
        attention.linear_qkv, attention.linear_proj = StrictColumn, StrictRow
        attention.q_layernorm = attention.k_layernorm = StrictHeadNorm
        attention.core_attention = StrictAttention
    if "ffn" in routes:
        parts.pre_mlp_layernorm = StrictNorm
        parts.mlp.submodules.linear_fc1, parts.mlp.submodules.linear_fc2 = StrictColumn, StrictRow
    return layer


def _block(config: StrictConfig) -> TransformerBlockSubmodules:
    layer = strict_layer()
    layer.module = StrictLayer
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=StrictNorm)


class StrictModel:
    """Megatron's GPTModel on the strict operators; this rank's parameters by packed name, in model order."""

    def __init__(
        self,
        config: Qwen3Config,
        numerics: Numerics,
        packed: Mapping[str, torch.Tensor],
        parallel: Parallel,
        device: torch.device = CPU,
    ) -> None:
        self.config, self.numerics, self.parallel, self.tokens = config, numerics, parallel, Tokens(parallel)
        self.scoring = Scoring(config.vocab_size, config.padded_vocab(numerics), numerics, parallel)
        settings = strict_settings(config, numerics, self.tokens, parallel, device)
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
        ).to(device)
        self.parameters = parameters.named_parameters(self.module, packed)
        parameters.load(self.parameters, self.from_packed(packed))
        parameters.prepare_gradients(self.parameters)

    def from_packed(self, packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's shards of whole packed tensors."""
        return {name: shards.part(name, tensor, self.parallel.tp) for name, tensor in packed.items()}

    def to_packed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole packed tensors from every rank's shards: all TP ranks call it."""
        return shards.whole(tensors, self.parallel.tp)

    def score(self, batch: MicroBatch, trace: Trace | None = None) -> list[float]:
        """Logprob of every response token of all samples, fp32 values; the same on every rank."""
        require_ids(batch.samples, self.config.vocab_size)
        if trace is not None and not self.parallel.alone:
            raise ValueError("intermediates are recorded in a world of one: trace with TP = CP = 1")
        with torch.no_grad(), trusted(), self.tokens.use(batch, trace):
            scores, bad = self.scoring.joined(batch, *self._logp(batch))
            require_finite(bad)
            return scores.tolist()

    def accumulate(self, batch: MicroBatch, seeds: Seeds) -> None:
        """Score with gradients, ask ``seeds`` for dL/dlogp of every response token, and fold the weight gradients.

        The backward pass is on its way before the host waits to know whether the scores are finite: gradients mean nothing after an error.
        """
        require_ids(batch.samples, self.config.vocab_size)
        with trusted(), self.tokens.use(batch):
            scores, bad = self._logp(batch)
            every, worst = self.scoring.joined(batch, scores, bad)
            scores.backward(self.scoring.seeded(batch, scores, seeds(every).float()))
            self.tokens.require_gradients(self.parameters)
            self.tokens.join()
            require_finite(worst)

    def _logp(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`Scoring.rows` of this rank's rows that are scored, of all of them while a trace is on."""
        edges, longest = batch.cu_seqlens, batch.longest
        packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=edges, cu_seqlens_kv=edges, max_seqlen_q=longest, max_seqlen_kv=longest)
        logits = self.module(batch.ids[None], batch.positions[None], None, packed_seq_params=packed)[0]
        scores, bad = self.scoring.rows(batch, logits)
        trace = self.tokens.trace
        if trace is not None:
            trace.put("logits", logits[:, : self.config.vocab_size])
            trace.put("logp", scores)
        return scores, bad
