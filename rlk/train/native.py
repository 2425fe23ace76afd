"""The native trainer model: Megatron-core's own local layers and torch's operators, nothing of this project's.

It is the P arm of the ablations: what an unmodified trainer would score. On a card nothing is touched; on the CPU stock Megatron reaches
for CUDA in four places on the way, each of which is given a CPU value through Megatron's own interface, and no arithmetic is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from rlk.contract.numerics import Numerics
from rlk.model.config import Qwen3Config
from rlk.model.trace import Trace
from rlk.parallel.state import Parallel
from rlk.train import parameters
from rlk.train.batch import MicroBatch, Sample
from rlk.train.megatron import CPU, Seeds, megatron_settings


class CpuRotaryEmbedding(RotaryEmbedding):
    """Megatron's rotary embedding, whose ``get_emb`` would move its frequencies to a CUDA device."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        freqs = self.get_freqs_non_repeated(max_seq_len, offset)
        return torch.cat((freqs, freqs), dim=-1)[:, None, None, :]


class NativeModel:
    """Megatron's stock GPTModel in bf16; parameters by packed name, in model order."""

    named: ClassVar[str] = "native mode"

    def __init__(
        self,
        config: Qwen3Config,
        numerics: Numerics,
        packed: Mapping[str, torch.Tensor],
        parallel: Parallel,
        device: torch.device = CPU,
    ) -> None:
        self.config, self.numerics, self.parallel, self.device = config, numerics, parallel, device
        self.module = self._module()
        self.module.to(device).bfloat16()
        if device.type == "cpu":
            self.module.rotary_pos_emb = CpuRotaryEmbedding(
                config.head_dim, rotary_percent=1.0, rotary_base=config.rope_theta, use_cpu_initialization=True
            )
        self.parameters = parameters.named_parameters(self.module, packed)
        parameters.load(self.parameters, self.from_packed(packed))
        parameters.prepare_gradients(self.parameters)

    def _module(self) -> GPTModel:
        settings = TransformerConfig(**megatron_settings(self.config, device=self.device))
        return self._stock(settings, get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"))

    def _stock(self, settings: TransformerConfig, layer: ModuleSpec) -> GPTModel:
        return GPTModel(
            config=settings,
            transformer_layer_spec=layer,
            vocab_size=self.config.padded_vocab(self.numerics),
            max_sequence_length=self.config.max_position_embeddings,
            position_embedding_type="rope",
            rotary_base=self.config.rope_theta,
            share_embeddings_and_output_weights=False,
        )

    def from_packed(self, packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Packed tensors in the layout of the parameters: gate_up rows become [gate | up], as Megatron's MLP splits them."""
        outer = self.numerics.canonical_tp
        return {name: self._swap(tensor, outer, 2) if self._gated(name) else tensor for name, tensor in packed.items()}

    def to_packed(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Inverse of :meth:`from_packed`."""
        inner = self.numerics.canonical_tp
        return {name: self._swap(tensor, 2, inner) if self._gated(name) else tensor for name, tensor in tensors.items()}

    def _gated(self, name: str) -> bool:
        return name.endswith(".gate_up")

    @staticmethod
    def _swap(tensor: torch.Tensor, outer: int, inner: int) -> torch.Tensor:
        return tensor.reshape(outer, inner, -1, tensor.shape[1]).transpose(0, 1).reshape(tensor.shape)

    def score(self, batch: MicroBatch, trace: Trace | None = None) -> list[float]:
        """Logprob of every target. Raises ValueError if a trace is asked for: Megatron's own layers report no intermediates."""
        if trace is not None:
            raise ValueError(f"{self.named} records no intermediates: trace in strict mode")
        with torch.no_grad():
            return self._scores(batch).tolist()

    def accumulate(self, batch: MicroBatch, seeds: Seeds) -> None:
        """Score with gradients, ask ``seeds`` for dL/dlogp of every target, and add autograd's bf16 gradients to the main gradients."""
        scores = self._scores(batch)
        scores.backward(seeds(scores.detach()).float())
        for parameter in self.parameters.values():
            parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
            parameter.grad = None

    def _scores(self, batch: MicroBatch) -> torch.Tensor:
        return torch.cat([self._logp(sample) for sample in batch.samples])

    def _logp(self, sample: Sample) -> torch.Tensor:
        """fp32 logprob of every response token of one sample."""
        return native_logp(sample, self._logits(sample)[:, : self.config.vocab_size].float())

    def _logits(self, sample: Sample) -> torch.Tensor:
        """Logits of every token of one sample, [tokens, padded vocabulary]."""
        device = self.device
        ids = torch.tensor([sample.ids], device=device)
        length = ids.shape[1]
        if device.type == "cpu":
            # Stock attention would allocate its score buffer on a CUDA device.
            scores = torch.empty(self.config.num_attention_heads * length * length, dtype=torch.bfloat16)
            parallel_state.get_global_memory_buffer().buffer["mpu", torch.bfloat16] = scores
        hidden_keys = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)[None, None]
        positions = torch.arange(length, device=device)[None]
        logits: torch.Tensor = self.module(ids, positions, hidden_keys)[0]
        return logits


def native_logp(sample: Sample, logits: torch.Tensor) -> torch.Tensor:
    """torch's own logprob of every response token of one sample from the fp32 logits [tokens, vocabulary] of all its tokens."""
    answer = sample.response.token_ids
    logits = logits[-len(answer) - 1 : -1] / sample.request.sampling.scoring_temperature
    if sample.response.support is not None:
        kept = torch.zeros(logits.shape, dtype=torch.bool)
        for row, ids_kept in enumerate(sample.response.support):
            kept[row, list(ids_kept)] = True
        logits = logits.masked_fill(~kept.to(logits.device), float("-inf"))
    return torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(answer, device=logits.device)[:, None])[:, 0]
