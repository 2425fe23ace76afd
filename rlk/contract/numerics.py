"""Numeric contract, version 1: the values within which two runs promise equal bytes.

Every number that can change a byte of a result is a field of :class:`Numerics` and is recorded with every result.
Equality is promised between two runs only if all of these fields agree.
"""

from __future__ import annotations

import math
import struct
from dataclasses import asdict, dataclass
from typing import Literal

CONTRACT_VERSION = 1

AttentionFamily = Literal["fixed-split", "vendor-one-split"]


class ContractError(ValueError):
    """A value that the contract refuses; the message names the value and the remedy."""


def is_power_of_two(value: int) -> bool:
    """True for 1, 2, 4, 8, …"""
    return value > 0 and value & (value - 1) == 0


def ceil_to(value: int, multiple: int) -> int:
    """Smallest multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple


def padded_vocab_size(vocab_size: int, canonical_tp: int) -> int:
    """Vocabulary rows after padding: the next multiple of 128·canonical_tp (Qwen3 at 8: 151936 → 152576)."""
    return ceil_to(vocab_size, 128 * canonical_tp)


def round_fp32(value: float) -> float:
    """The fp32 value nearest to ``value`` (ties to even), as a Python float; infinite beyond the fp32 range."""
    try:
        nearest: float = struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(math.inf, value)
    return nearest


@dataclass(frozen=True)
class Numerics:
    """Orders and tile sizes that fix the bytes of every operator.

    canonical_tp: shards of every split-order contraction and of the vocabulary; a power of two.
    canonical_cp: token leaves of every weight gradient; a power of two.
    mma_k: products that one accumulation step adds at once.
    kv_tile: keys per attention tile; a multiple of mma_k.
    kv_split: keys per attention split, 0 for one split; a multiple of kv_tile.
    vocab_tile: columns per logprob tile inside one vocabulary shard.
    attention_family: which of the two attention orders holds.
    """

    canonical_tp: int = 8
    canonical_cp: int = 8
    mma_k: int = 16
    kv_tile: int = 32
    kv_split: int = 64
    vocab_tile: int = 1024
    attention_family: AttentionFamily = "fixed-split"

    def __post_init__(self) -> None:
        for name in ("canonical_tp", "canonical_cp"):
            if not is_power_of_two(getattr(self, name)):
                raise ContractError(f"{name}={getattr(self, name)} is not a power of two: use 1, 2, 4 or 8")
        if self.mma_k != 16:
            raise ContractError(f"mma_k={self.mma_k}: contract version {CONTRACT_VERSION} adds groups of 16")
        if self.kv_tile <= 0 or self.kv_tile % self.mma_k:
            raise ContractError(f"kv_tile={self.kv_tile} is not a positive multiple of mma_k={self.mma_k}")
        if self.kv_split < 0 or self.kv_split % self.kv_tile:
            raise ContractError(f"kv_split={self.kv_split} is neither 0 nor a multiple of kv_tile={self.kv_tile}")
        if (self.attention_family == "vendor-one-split") != (self.kv_split == 0):
            raise ContractError(f"attention_family={self.attention_family} does not fit kv_split={self.kv_split}")
        if self.vocab_tile <= 0:
            raise ContractError(f"vocab_tile={self.vocab_tile} must be positive")

    def attention_backend(self, device: str) -> str | None:
        """Backend of attention on a device type: the certified library's where the family is its own, None for the device's.

        A CPU has no such library: there the family is one split of the CPU backend, whose bytes are compared with its own only.
        """
        return "vendor" if self.attention_family == "vendor-one-split" and device == "cuda" else None

    def as_dict(self) -> dict[str, int | str]:
        """Plain fields plus the contract version, as recorded with results."""
        return {"contract_version": CONTRACT_VERSION, **asdict(self)}

    def record(self, vocab_size: int, backend: str) -> dict[str, int | str]:
        """Everything within one value of which equality is promised: the fields, the padded vocabulary and the backend."""
        return {**self.as_dict(), "padded_vocab": padded_vocab_size(vocab_size, self.canonical_tp), "backend": backend}

    def require_divides(self, **sizes: int) -> None:
        """Raise unless canonical_tp divides every given size (query heads, KV heads, intermediate size, padded vocabulary)."""
        for name, size in sizes.items():
            if size % self.canonical_tp:
                common = math.gcd(size, self.canonical_tp)
                raise ContractError(
                    f"{name}={size} is not a multiple of canonical_tp={self.canonical_tp}: set canonical_tp={common} or less"
                )


DEFAULT = Numerics()
HOPPER = Numerics(kv_tile=64, kv_split=256)
"""Attention tiles and splits that suit a Hopper card; the default's are small, so that short tests cross their edges."""
