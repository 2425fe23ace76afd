"""Dimensions of the dense models that workloads use, and the linear layers they contain."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rlk.contract.numerics import DEFAULT, Numerics, padded_vocab_size


@dataclass(frozen=True)
class GemmShape:
    """One linear layer y[T, n] = x[T, k]·w[n, k]ᵀ of a model."""

    name: str
    n: int
    k: int


@dataclass(frozen=True)
class ModelShape:
    """Dimensions of a Qwen3 dense model; vocab_size counts real rows."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rope_theta: float = 1e6
    rms_norm_eps: float = 1e-6

    def padded_vocab(self, numerics: Numerics = DEFAULT) -> int:
        """Vocabulary rows after padding."""
        return padded_vocab_size(self.vocab_size, numerics.canonical_tp)

    def gemms(self, numerics: Numerics = DEFAULT) -> tuple[GemmShape, ...]:
        """The linear layers, named as in ``rlk.contract.orders.CONTRACTIONS``."""
        q, kv = self.q_heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            GemmShape("qkv", q + 2 * kv, self.hidden),
            GemmShape("o_proj", self.hidden, q),
            GemmShape("gate_up", 2 * self.intermediate, self.hidden),
            GemmShape("down_proj", self.hidden, self.intermediate),
            GemmShape("lm_head", self.padded_vocab(numerics), self.hidden),
        )

    def require_fits(self, numerics: Numerics = DEFAULT) -> None:
        """Raise ContractError unless canonical_tp divides heads, intermediate size and padded vocabulary."""
        numerics.require_divides(
            query_heads=self.q_heads,
            kv_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            padded_vocab=self.padded_vocab(numerics),
        )


TINY = ModelShape("tiny", 128, 256, 2, 16, 8, 32, 260, 512)
"""Runs in both real engines on a CPU; canonical TP 8 divides it, two query heads share a KV head, most of its vocabulary is padding."""

QWEN3_8B = ModelShape("qwen3-8b", 4096, 12288, 36, 32, 8, 128, 151936, 40960)
QWEN3_8B_UPDATED = replace(QWEN3_8B, name="qwen3-8b-2layers-vocab16000", layers=2, vocab_size=16000, max_positions=4096)
"""Layers of full width; depth and vocabulary are cut so that weights, gradients, masters and moments of several engines fit one card, and a
publication takes seconds."""


@dataclass(frozen=True)
class Snapshot:
    """Published weights that a claim may rest on. model_hash: of the bf16 weights (``rlk.model.weights``), "" until somebody has recorded
    it from a trusted download; without it no directory is accepted."""

    repository: str
    revision: str
    model_hash: str


QWEN3_8B_SNAPSHOT = Snapshot("Qwen/Qwen3-8B", "b968826d9c46dd6066d109eabc6255188de91218", "")
