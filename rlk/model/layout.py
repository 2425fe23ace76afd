"""Packed weight layout of the engines against the Hugging Face names of a checkpoint.

Packed names: ``embedding``, ``final_norm``, ``lm_head`` and per layer ``layers.{i}.`` + ``input_norm``, ``qkv``, ``q_norm``, ``k_norm``,
``o_proj``, ``post_norm``, ``gate_up``, ``down_proj``.

* qkv rows: per KV group, ascending, [its query heads | its key head | its value head], so that a canonical shard is a contiguous slice.
* gate_up rows: per canonical shard s, ascending, [gate rows of s | up rows of s].
* embedding and lm_head rows are padded with +0 to the padded vocabulary.

Both directions only copy bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

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
    shapes = packed_shapes(config, numerics)
    groups, shards, head_dim, hidden = config.num_key_value_heads, numerics.canonical_tp, config.head_dim, config.hidden_size
    packed = {name: _pad_rows(hf[source], shapes[name][0]) for name, source in _VOCABULARY.items()}
    packed.update({name: hf[source] for name, source in _TOP_SAME.items()})
    for i in range(config.num_hidden_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        packed.update({ours + name: hf[theirs + source] for name, source in _LAYER_SAME.items()})
        heads = [hf[f"{theirs}self_attn.{kind}_proj.weight"].reshape(groups, -1, head_dim, hidden) for kind in "qkv"]
        packed[ours + "qkv"] = torch.cat(heads, dim=1).reshape(-1, hidden)
        halves = [hf[f"{theirs}mlp.{kind}_proj.weight"].reshape(shards, -1, hidden) for kind in ("gate", "up")]
        packed[ours + "gate_up"] = torch.cat(halves, dim=1).reshape(-1, hidden)
    return {name: packed[name] for name in shapes}


def unpack_weights(packed: Mapping[str, torch.Tensor], config: Qwen3Config, numerics: Numerics) -> dict[str, torch.Tensor]:
    """Exact inverse of :func:`pack_weights`, without the padding rows.

    Raises CheckpointError for a missing, extra or wrongly shaped tensor, and for a padding row that is not +0.
    """
    check_shapes({name: tuple(t.shape) for name, t in packed.items()}, packed_shapes(config, numerics), "packed weights")
    groups, shards, head_dim, hidden = config.num_key_value_heads, numerics.canonical_tp, config.head_dim, config.hidden_size
    hf = {source: _drop_rows(name, packed[name], config.vocab_size) for name, source in _VOCABULARY.items()}
    hf.update({source: packed[name] for name, source in _TOP_SAME.items()})
    for i in range(config.num_hidden_layers):
        ours, theirs = f"layers.{i}.", f"model.layers.{i}."
        hf.update({theirs + source: packed[ours + name] for name, source in _LAYER_SAME.items()})
        heads = packed[ours + "qkv"].reshape(groups, config.heads_per_group + 2, head_dim, hidden)
        for kind, part in zip("qkv", heads.split([config.heads_per_group, 1, 1], dim=1)):
            hf[f"{theirs}self_attn.{kind}_proj.weight"] = part.reshape(-1, hidden)
        halves = packed[ours + "gate_up"].reshape(shards, 2, -1, hidden)
        for kind, part in zip(("gate", "up"), halves.unbind(dim=1)):
            hf[f"{theirs}mlp.{kind}_proj.weight"] = part.reshape(-1, hidden)
    return {name: hf[name].contiguous() for name in hf_shapes(config)}


def _pad_rows(weight: torch.Tensor, rows: int) -> torch.Tensor:
    padded = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    padded[: weight.shape[0]] = weight
    return padded


def _drop_rows(name: str, weight: torch.Tensor, rows: int) -> torch.Tensor:
    # Bytes, not values: a padding row of -0 compares equal to zero and is still a broken contract.
    if weight[rows:].contiguous().view(torch.uint8).any():
        raise CheckpointError(f"packed weights: {name} has a padding row at or after {rows} that is not +0; keep updates off padding rows")
    return weight[:rows]
