"""THE forward pass of Qwen3 dense: one ``decoder_layer`` that every engine runs.

An engine supplies its own modules as :class:`LayerOps` (Megatron's linears, vLLM's attention); what happens between them, in which order
and where bf16 rounding takes place, is written here once. Rounding points: after the embedding, each norm, each GEMM except lm_head, rope,
attention, each residual sum and swiglu (contract, rounding points).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn

from rlk.contract.numerics import Numerics
from rlk.contract.topology import owned
from rlk.kernels.qk_norm import qk_norm
from rlk.kernels.rms_norm import rms_norm
from rlk.kernels.rope import rope, rope_table
from rlk.kernels.swiglu import swiglu
from rlk.model import shards
from rlk.model.config import Qwen3Config
from rlk.model.layout import Unpacked, check_shapes, hf_shapes, pack_into, packed_shapes
from rlk.model.linear import column, joined, output, row, vocabulary_embedding
from rlk.model.trace import Trace
from rlk.parallel.collectives import ALONE, Group

Unary = Callable[[torch.Tensor], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Keep = Callable[[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayerOps:
    """The parts of one decoder layer that own weights, state or communication. All tensors bf16, rows are tokens.

    input_norm, post_norm: [T, H] -> [T, H]. qkv: [T, H] -> [T, groups·(heads per group + 2)·D], rows packed per KV group.
    q_norm, k_norm: [T, heads, D] -> same. attend: (q [T, Hq, D], k [T, Hk, D], v [T, Hk, D]) -> [T, Hq·D].
    o_proj: [T, Hq·D] -> [T, H]. gate_up: [T, H] -> [T, 2I] per canonical shard [gate | up]. down_proj: [T, I] -> [T, H].
    On a tensor-parallel rank the head, group and intermediate counts are the local ones; o_proj and down_proj return whole sums.
    """

    input_norm: Unary
    qkv: Unary
    q_norm: Unary
    k_norm: Unary
    attend: Attend
    o_proj: Unary
    post_norm: Unary
    gate_up: Unary
    down_proj: Unary


def _untraced(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def split_qkv(packed: torch.Tensor, config: Qwen3Config) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[T, groups·(g+2)·D] -> q [T, groups·g, D], k and v [T, groups, D]; ``groups`` follows from the width (local on a TP rank)."""
    tokens, g, d = packed.shape[0], config.heads_per_group, config.head_dim
    groups = packed.shape[1] // ((g + 2) * d)  # spelled out: -1 has no meaning where there are no tokens
    # torch.split, not slices: its backward concatenates, while slices add zero-filled tensors, which turns -0 into +0.
    q, k, v = packed.reshape(tokens, groups, g + 2, d).split([g, 1, 1], dim=2)
    return q.reshape(tokens, groups * g, d), k.reshape(tokens, groups, d), v.reshape(tokens, groups, d)


def decoder_layer(
    x: torch.Tensor,
    ops: LayerOps,
    positions: torch.Tensor,
    table: torch.Tensor,
    config: Qwen3Config,
    numerics: Numerics,
    trace: Trace | None,
    prefix: str,
) -> torch.Tensor:
    """One pre-norm decoder layer, [T, H] bf16 -> [T, H] bf16. Source: Qwen3 technical report 2025, §2 (q/k norm before RoPE).

    positions: int64 [T], logical position of each row in its own sequence; table: fp32 [2, max_positions, D/2] from ``rope_table``;
    trace, if given, receives the intermediates under ``prefix`` ("layers.3."). Both norms read the rounded residual.
    """

    def keep(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if trace is not None:
            trace.put(prefix + name, tensor)
        return tensor

    x = keep("attn_residual", x + self_attention(keep("input_norm", ops.input_norm(x)), ops, positions, table, config, keep))
    return keep("mlp_residual", x + feed_forward(keep("post_norm", ops.post_norm(x)), ops, config, numerics, keep))


def self_attention(
    x: torch.Tensor, ops: LayerOps, positions: torch.Tensor, table: torch.Tensor, config: Qwen3Config, keep: Keep = _untraced
) -> torch.Tensor:
    """Normed rows [T, H] -> what attention adds to the residual, [T, H]; ``keep`` sees every intermediate by name and returns it."""
    q, k, v = split_qkv(keep("qkv", ops.qkv(x)), config)
    keep("v", v)
    q = keep("q_rope", rope(keep("q_norm", ops.q_norm(q)), positions, table))
    k = keep("k_rope", rope(keep("k_norm", ops.k_norm(k)), positions, table))
    return keep("o_proj", ops.o_proj(keep("attention", ops.attend(q, k, v))))


def feed_forward(x: torch.Tensor, ops: LayerOps, config: Qwen3Config, numerics: Numerics, keep: Keep = _untraced) -> torch.Tensor:
    """Normed rows [T, H] -> what the MLP adds to the residual, [T, H]; ``keep`` as in :func:`self_attention`."""
    gate_up = keep("gate_up", ops.gate_up(x))
    return keep("down_proj", ops.down_proj(keep("swiglu", swiglu(gate_up, held_shards(gate_up, config, numerics)))))


def held_shards(gate_up: torch.Tensor, config: Qwen3Config, numerics: Numerics) -> int:
    """Canonical shards in ``gate_up``: a tensor-parallel rank holds a whole number of them, which follows from the local width."""
    return numerics.canonical_tp * gate_up.shape[-1] // (2 * config.intermediate_size)


class Qwen3Layer(nn.Module):
    """Packed weights of one layer (names and shapes: ``rlk.model.layout``)."""

    input_norm: nn.Parameter
    qkv: nn.Parameter
    q_norm: nn.Parameter
    k_norm: nn.Parameter
    o_proj: nn.Parameter
    post_norm: nn.Parameter
    gate_up: nn.Parameter
    down_proj: nn.Parameter

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device | None) -> None:
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, _unset(shape, device))

    def ops(self, attend: Attend, config: Qwen3Config, numerics: Numerics, tp: Group = ALONE) -> LayerOps:
        """The canonical operators on this rank's weights: split order where tensor parallelism may cut a contraction, else plain order."""
        eps, held = config.rms_norm_eps, len(owned(tp.size, tp.rank, numerics.canonical_tp))
        return LayerOps(
            input_norm=partial(rms_norm, gamma=self.input_norm, eps=eps),
            qkv=partial(column, w=self.qkv, shards=held, tp=tp),
            q_norm=partial(qk_norm, gamma=self.q_norm, eps=eps),
            k_norm=partial(qk_norm, gamma=self.k_norm, eps=eps),
            attend=attend,
            o_proj=partial(row, w=self.o_proj, shards=held, tp=tp),
            post_norm=partial(rms_norm, gamma=self.post_norm, eps=eps),
            gate_up=partial(column, w=self.gate_up, shards=held, tp=tp),
            down_proj=partial(row, w=self.down_proj, shards=held, tp=tp),
        )


class Qwen3Dense(nn.Module):
    """Qwen3 dense with packed bf16 weights; attention (and with it the KV cache) belongs to the caller.

    tp: the ranks that share the model, each with its canonical shards of heads, intermediate columns and vocabulary; by default this
    process has all of them. Every rank of the group calls every method but :meth:`parts`, with equal arguments.
    Parameter names are the packed names of ``rlk.model.layout``; they take no gradient. Until weights are loaded every parameter is NaN.
    The rope table is a buffer outside the state dict; max_positions bounds the positions that forward accepts.
    """

    rope_table: torch.Tensor

    def __init__(
        self,
        config: Qwen3Config,
        numerics: Numerics,
        *,
        max_positions: int | None = None,
        device: torch.device | None = None,
        tp: Group = ALONE,
    ) -> None:
        super().__init__()
        self.config, self.numerics, self.tp = config, numerics, tp
        shapes = {name: shards.part_shape(name, shape, self.tp) for name, shape in packed_shapes(config, numerics).items()}
        self.embedding = _unset(shapes["embedding"], device)
        self.layers = nn.ModuleList()
        for i in range(config.num_hidden_layers):
            prefix = f"layers.{i}."
            self.layers.append(Qwen3Layer({n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}, device))
        self.final_norm = _unset(shapes["final_norm"], device)
        self.lm_head = _unset(shapes["lm_head"], device)
        table = rope_table(config.head_dim, config.rope_theta, max_positions or config.max_position_embeddings)
        self.register_buffer("rope_table", table.to(self.embedding.device), persistent=False)

    def load_hf(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy a whole checkpoint (HF names, bf16) into the packed parameters. Raises CheckpointError naming a wrong tensor."""
        check_shapes({name: tuple(t.shape) for name, t in tensors.items()}, hf_shapes(self.config), "weights to load")
        shapes = packed_shapes(self.config, self.numerics)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if self.tp.size == 1:
                    pack_into(parameter, name, tensors, self.config, self.numerics)
                    continue
                whole = torch.empty(shapes[name], dtype=parameter.dtype)
                pack_into(whole, name, tensors, self.config, self.numerics)
                parameter.copy_(shards.part(name, whole, self.tp))

    def hf_tensors(self) -> Mapping[str, torch.Tensor]:
        """The weights that this module and its peers compute with, by HF name: the read-back behind a model hash.

        Each tensor is made when it is asked for.
        """
        return Unpacked(shards.whole(self.parts(), self.tp), self.config, self.numerics)

    def parts(self) -> dict[str, torch.Tensor]:
        """The weights that this rank computes with, by packed name."""
        return dict(self.named_parameters())

    def decoder_layers(self) -> list[Qwen3Layer]:
        """The layers in order."""
        return list(cast(Iterable[Qwen3Layer], self.layers))

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        attend: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
        trace: Trace | None = None,
    ) -> torch.Tensor:
        """ids, positions: int64 [T] -> final-norm hidden states bf16 [T, H].

        attend(layer, q, k, v) -> [T, Hq·D] is called once per layer, in order, with this rank's heads. Raises IndexError for an id outside
        the vocabulary.
        """
        x = vocabulary_embedding(ids, self.embedding, self.config.vocab_size, self.tp)
        if trace is not None:
            trace.put("embedding", x)
        for i, layer in enumerate(self.decoder_layers()):
            ops = layer.ops(partial(attend, i), self.config, self.numerics, self.tp)
            x = decoder_layer(x, ops, positions, self.rope_table, self.config, self.numerics, trace, f"layers.{i}.")
        hidden = rms_norm(x, self.final_norm, self.config.rms_norm_eps)
        if trace is not None:
            trace.put("final_norm", hidden)
        return hidden

    def logits(self, hidden: torch.Tensor, trace: Trace | None = None) -> torch.Tensor:
        """hidden bf16 [T, H] -> fp32 [T, vocab_size] on every rank; the columns of the padding rows are cut off."""
        logits = joined(self.columns(hidden), self.tp)[:, : self.config.vocab_size]
        if trace is not None:
            trace.put("logits", logits)
        return logits

    def columns(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden bf16 [T, H] -> fp32 [T, padded vocabulary / ranks]: the logits of this rank's vocabulary shards, padding included."""
        return output(hidden, self.lm_head, len(owned(self.tp.size, self.tp.rank, self.numerics.canonical_tp)), self.tp)


def _unset(shape: tuple[int, ...], device: torch.device | None) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device), requires_grad=False)
