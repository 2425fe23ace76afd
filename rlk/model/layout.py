"""Packed weight layout of the engines against the Hugging Face names of a checkpoint.

Packed names: ``embedding``, ``final_norm``, ``lm_head`` and per layer ``layers.{i}.`` + ``input_norm``, ``qkv``, ``q_norm``, ``k_norm``,
``o_proj``, ``post_norm``, ``gate_up``, ``down_proj``.

* qkv rows: per KV group, ascending, [its query heads | its key head | its value head], so that a canonical shard is a contiguous slice.
* gate_up rows: per canonical shard s, ascending, [gate rows of s | up rows of s].
* embedding and lm_head rows are padded with +0 to the padded vocabulary.

Both directions only copy bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from rlk.contract.numerics import Numerics
from rlk.model.config import CheckpointError, Qwen3Config

# Tensors whose layout is the same on both sides: packed name -> HF name.
_TOP_SAME = {"final_norm": "model.norm.weight"}
_LAYER_SAME = {
    "input_norm": "input_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "o_proj": "self_attn.o_proj.weight",
    "post_norm": "post_attention_layernorm.weight",
    "down_proj": "mlp.down_proj.weight",
}
_VOCABULARY = {"embedding": "model.embed_tokens.weight", "lm_head": "lm_head.weight"}


def hf_shapes(config: Qwen3Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint by HF name, in model order, with its shape."""
    c = config
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (c.vocab_size, c.hidden_size)}
    for i in range(c.num_hidden_layers):
        layer = {
            "input_layernorm.weight": (c.hidden_size,),
            "self_attn.q_proj.weight": (queries, c.hidden_size),
            "self_attn.k_proj.weight": (keys, c.hidden_size),
            "self_attn.v_proj.weight": (keys, c.hidden_size),
            "self_attn.q_norm.weight": (c.head_dim,),
            "self_attn.k_norm.weight": (c.head_dim,),
            "self_attn.o_proj.weight": (c.hidden_size, queries),
            "post_attention_layernorm.weight": (c.hidden_size,),
            "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
            "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
            "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
        }
        shapes.update({f"model.layers.{i}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (c.hidden_size,)
    shapes["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    return shapes


def packed_shapes(config: Qwen3Config, numerics: Numerics) -> dict[str, tuple[int, ...]]:
    """Every packed tensor by name, in model order, with its shape. Raises ContractError if canonical_tp does not divide a size."""
    config.require(numerics)
    c = config
    queries, keys, padded = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim, c.padded_vocab(numerics)
    shapes: dict[str, tuple[int, ...]] = {"embedding": (padded, c.hidden_size)}
    for i in range(c.num_hidden_layers):
        layer = {
            "input_norm": (c.hidden_size,),
            "qkv": (queries + 2 * keys, c.hidden_size),
            "q_norm": (c.head_dim,),
            "k_norm": (c.head_dim,),
            "o_proj": (c.hidden_size, queries),
            "post_norm": (c.hidden_size,),
            "gate_up": (2 * c.intermediate_size, c.hidden_size),
            "down_proj": (c.hidden_size, c.intermediate_size),
        }
        shapes.update({f"layers.{i}.{name}": shape for name, shape in layer.items()})
    shapes["final_norm"] = (c.hidden_size,)
    shapes["lm_head"] = (padded, c.hidden_size)
    return shapes


def check_shapes(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise CheckpointError naming the first missing, extra or wrongly shaped tensor."""
    for name in expected:
        if name not in found:
            raise CheckpointError(f"{where}: tensor {name} is missing; complete the checkpoint or correct its config.json")
    for name in found:
        if name not in expected:
            raise CheckpointError(f"{where}: unexpected tensor {name}; a Qwen3 dense checkpoint of this config has no such tensor")
    for name, shape in expected.items():
        if tuple(found[name]) != shape:
            raise CheckpointError(f"{where}: tensor {name} has shape {list(found[name])}, config.json asks for {list(shape)}")


def pack_weights(hf: Mapping[str, torch.Tensor], config: Qwen3Config, numerics: Numerics) -> dict[str, torch.Tensor]:
    """HF tensors -> packed tensors (fresh memory except where both layouts agree), any dtype.

    Raises CheckpointError for a missing, extra or wrongly shaped tensor, ContractError if canonical_tp does not divide a size.
    """
    check_shapes({name: tuple(t.shape) for name, t in hf.items()}, hf_shapes(config), "weights to pack")
    packed: dict[str, torch.Tensor] = {}
    for name, shape in packed_shapes(config, numerics).items():
        sources = sources_of(name)
        if len(sources) == 1 and tuple(hf[sources[0]].shape) == shape:
            packed[name] = hf[sources[0]]
            continue
        packed[name] = hf[sources[0]].new_empty(shape)
        pack_into(packed[name], name, hf, config, numerics)
    return packed


def pack_into(to: torch.Tensor, name: str, hf: Mapping[str, torch.Tensor], config: Qwen3Config, numerics: Numerics) -> None:
    """Write packed tensor ``name`` into ``to``, on any device, from the HF tensors of :func:`sources_of`."""
    sources = [hf[source] for source in sources_of(name)]
    if len(sources) == 1:
        rows = sources[0].shape[0]
        to[:rows].copy_(sources[0])
        to[rows:].zero_()
        return
    for part, source in zip(_parts(to, name, config, numerics), sources, strict=True):
        part.copy_(source.reshape(part.shape))


def sources_of(name: str) -> tuple[str, ...]:
    """HF names of what packed tensor ``name`` holds, in the order of its rows."""
    layer, _, last = name.rpartition(".")
    if not layer:
        return ((_VOCABULARY | _TOP_SAME)[name],)
    kinds = {"qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "gate_up": ("mlp.gate_proj", "mlp.up_proj")}
    names = [f"{kind}.weight" for kind in kinds[last]] if last in kinds else [_LAYER_SAME[last]]
    return tuple(f"model.{layer}.{source}" for source in names)


def _parts(packed: torch.Tensor, name: str, config: Qwen3Config, numerics: Numerics) -> tuple[torch.Tensor, ...]:
    """Views of a whole packed qkv or gate_up, one per HF tensor: [groups, heads, D, hidden] or [shards, rows, hidden]."""
    if name.endswith("qkv"):
        heads = packed.view(config.num_key_value_heads, config.heads_per_group + 2, config.head_dim, -1)
        return heads.split([config.heads_per_group, 1, 1], dim=1)
    return packed.view(numerics.canonical_tp, 2, -1, packed.shape[1]).unbind(dim=1)


class Unpacked(Mapping[str, torch.Tensor]):
    """Exact inverse of :func:`pack_weights`, without the padding rows; a tensor is made when it is asked for.

    Raises CheckpointError for a missing, extra or wrongly shaped tensor, and for a padding row that is not +0.
    """

    def __init__(self, packed: Mapping[str, torch.Tensor], config: Qwen3Config, numerics: Numerics) -> None:
        check_shapes({name: tuple(t.shape) for name, t in packed.items()}, packed_shapes(config, numerics), "packed weights")
        self._packed, self._config, self._numerics = packed, config, numerics
        self._names = hf_shapes(config)
        self._places = {source: (name, i) for name in packed for i, source in enumerate(sources_of(name))}
        for name in _VOCABULARY:
            _require_padding(name, packed[name], config.vocab_size)

    def __getitem__(self, source: str) -> torch.Tensor:
        name, i = self._places[source]
        held, shape = self._packed[name], self._names[source]
        if len(sources_of(name)) == 1:
            return held[: shape[0]].contiguous()
        return _parts(held, name, self._config, self._numerics)[i].reshape(shape).contiguous()

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def unpack_weights(packed: Mapping[str, torch.Tensor], config: Qwen3Config, numerics: Numerics) -> dict[str, torch.Tensor]:
    """Every tensor of :class:`Unpacked`."""
    return dict(Unpacked(packed, config, numerics))


def _require_padding(name: str, weight: torch.Tensor, rows: int) -> None:
    # Bytes, not values: a padding row of -0 compares equal to zero and is still a broken contract.
    if weight[rows:].contiguous().view(torch.uint8).any():
        raise CheckpointError(f"packed weights: {name} has a padding row at or after {rows} that is not +0; keep updates off padding rows")
