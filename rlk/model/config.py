"""Qwen3 dense architecture as read from a Hugging Face ``config.json``; everything that changes the mathematics is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlk.contract.numerics import Numerics, padded_vocab_size


class CheckpointError(ValueError):
    """A checkpoint or configuration that cannot be used; the message names the file or field and the remedy."""


_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class Qwen3Config:
    """Sizes of a Qwen3 dense decoder (grouped-query attention, q/k norm, SwiGLU, untied head, no biases).

    Sizes count elements, heads or positions; rms_norm_eps and rope_theta are plain numbers.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    def __post_init__(self) -> None:
        for name in _SIZES:
            value = getattr(self, name)
            if type(value) is not int or value <= 0:
                raise CheckpointError(f"config: {name}={value!r} must be a positive integer")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not 0 < value < float("inf"):
                raise CheckpointError(f"config: {name}={value!r} must be a positive finite number")
        if self.num_attention_heads % self.num_key_value_heads:
            heads, groups = self.num_attention_heads, self.num_key_value_heads
            raise CheckpointError(f"config: num_attention_heads={heads} is not a multiple of num_key_value_heads={groups}")
        if self.head_dim % 2:
            raise CheckpointError(f"config: head_dim={self.head_dim} must be even for rotary embeddings")

    @property
    def heads_per_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def attention_scale(self) -> float:
        """Factor of q·k: 1/sqrt(head_dim)."""
        return float(self.head_dim**-0.5)

    def padded_vocab(self, numerics: Numerics) -> int:
        """Vocabulary rows including the +0 padding of the contract."""
        return padded_vocab_size(self.vocab_size, numerics.canonical_tp)

    def require(self, numerics: Numerics) -> None:
        """Raise ContractError unless canonical_tp divides every size that tensor parallelism may split."""
        numerics.require_divides(
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            intermediate_size=self.intermediate_size,
            padded_vocab=self.padded_vocab(numerics),
        )

    @classmethod
    def from_json(cls, path: Path) -> Qwen3Config:
        """Read ``config.json`` (or the directory that holds it). Raises CheckpointError in one line for anything outside the contract."""
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot read the model configuration ({error.strerror}); give a checkpoint directory") from error
        except ValueError as error:
            raise CheckpointError(f"{path}: not valid JSON ({error})") from error
        if not isinstance(raw, dict):
            raise CheckpointError(f"{path}: must hold a JSON object, found {type(raw).__name__}")
        try:
            return cls.from_dict(raw)
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Qwen3Config:
        """The same from parsed JSON."""
        _refuse_other_mathematics(raw)
        missing = [name for name in (*_SIZES, "rms_norm_eps") if raw.get(name) is None]
        if missing:
            raise CheckpointError(f"config: {', '.join(missing)} missing; write every size explicitly, defaults differ between libraries")
        return cls(**{name: raw[name] for name in _SIZES}, rms_norm_eps=raw["rms_norm_eps"], rope_theta=_rope_theta(raw))

    def to_dict(self) -> dict[str, Any]:
        """A ``config.json`` that transformers (4 and 5) and vLLM load as this architecture in bf16."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **{name: getattr(self, name) for name in _SIZES},
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "attention_bias": False,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }


def _refuse_other_mathematics(raw: Mapping[str, Any]) -> None:
    if raw.get("model_type") != "qwen3":
        raise CheckpointError(f"config: model_type={raw.get('model_type')!r} is not supported, only 'qwen3' (dense)")
    if raw.get("tie_word_embeddings"):
        raise CheckpointError("config: tie_word_embeddings is refused by contract version 1; use a checkpoint with its own lm_head")
    if raw.get("attention_bias"):
        raise CheckpointError("config: attention_bias is not supported; Qwen3 dense has no biases")
    if raw.get("use_sliding_window") or any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        raise CheckpointError("config: sliding-window attention is not supported; every layer must be full_attention")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"config: hidden_act={raw['hidden_act']!r} is not supported, only 'silu'")
    if raw.get("quantization_config") is not None:
        raise CheckpointError("config: quantization_config is not supported; the contract stores bf16 weights")
    stored = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    if stored != "bfloat16":
        raise CheckpointError(f"config: dtype={stored!r} is not supported; convert the checkpoint to bfloat16")


def _rope_theta(raw: Mapping[str, Any]) -> float:
    """rope_theta from the top level (transformers 4) or from rope_parameters (transformers 5); scaled variants are refused."""
    scopes = {name: raw[name] for name in ("rope_scaling", "rope_parameters") if raw.get(name) is not None}
    for name, scope in scopes.items():
        if not isinstance(scope, Mapping):
            raise CheckpointError(f"config: {name} must be an object, found {scope!r}")
        kind = scope.get("rope_type", scope.get("type", "default"))
        if kind != "default":
            raise CheckpointError(f"config: {name} asks for {kind!r} RoPE scaling, which is not supported; only 'default'")
        unknown = set(scope) - {"rope_type", "type", "rope_theta"}
        if unknown:
            raise CheckpointError(f"config: {name}.{min(unknown)} is not supported; only plain RoPE with rope_theta")
    values = [scope["rope_theta"] for scope in (raw, *scopes.values()) if scope.get("rope_theta") is not None]
    if not values:
        raise CheckpointError("config: rope_theta missing; write it at the top level or under rope_parameters")
    if any(value != values[0] for value in values):
        raise CheckpointError(f"config: rope_theta is given twice with different values {values}; keep one")
    theta = values[0]
    return float(theta) if type(theta) is int else theta
