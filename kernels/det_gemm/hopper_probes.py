"""Inputs that bring out the arithmetic of a matrix instruction, the same bits on every machine, and the products whose bytes are recorded.

Every value is made from the hash of (seed, operand, position), so that it depends on no library's generator.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from rlk.contract.topology import TokenLeaves, token_leaves
from rlk.kernels.det_gemm import hopper

SPECIAL_ONE_IN = 4096
TOKENS = (300, 7, 129, 64)
"""Lengths of the samples of the recorded weight gradient."""


@dataclass(frozen=True)
class Family:
    """Biased exponents of x and w, uniform in [first, last], and what else there is.

    cancelling: odd k nearly repeat the product before them with the other sign. zeros: half of the values are ±0. special: some are NaN or
    infinite.
    """

    name: str
    x: tuple[int, int]
    w: tuple[int, int]
    cancelling: bool = False
    zeros: bool = False
    special: bool = False


FAMILIES = (
    Family("random", (119, 127), (119, 127)),
    Family("wide", (97, 157), (97, 157)),
    Family("cancelling", (112, 127), (112, 127), cancelling=True),
    Family("subnormal x", (0, 4), (97, 124)),
    Family("subnormal w", (97, 124), (0, 4)),
    Family("vanishing", (0, 64), (0, 64)),
    Family("huge", (170, 189), (175, 190)),
    Family("cancelling huge", (180, 191), (180, 191), cancelling=True),
    Family("zeros beside huge values", (0, 254), (97, 157), zeros=True),
    Family("NaN and infinity", (97, 157), (97, 157), zeros=True, special=True),
)


def words(seed: int, stream: int, *shape: int) -> torch.Tensor:
    """``shape`` random 32-bit words as int64: splitmix64 of the position, of ``seed`` and of ``stream`` (below 2^16)."""
    count = 1
    for size in shape:
        count *= size
    z = torch.arange(count) + (seed << 48 | stream << 32)
    for shift, factor in ((0, 0x9E3779B97F4A7C15), (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1) if shift else 0)) * (factor - (1 << 64))
    return ((z >> 32) & 0xFFFFFFFF).reshape(shape)


def _bf16(word: torch.Tensor, exponents: tuple[int, int]) -> torch.Tensor:
    """Bits of bf16 values: sign and fraction from the word's low bits, the exponent from its high ones."""
    first, last = exponents
    return (word & 1) << 15 | ((word >> 8) % (last - first + 1) + first) << 7 | (word >> 1 & 0x7F)


def operands(family: Family, seed: int, rows: int, columns: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, k] and w [columns, k], bf16."""
    found = []
    for stream, (count, exponents) in enumerate(((rows, family.x), (columns, family.w))):
        word = words(seed, stream, count, k)
        bits = _bf16(word, exponents)
        if family.cancelling:
            flipped = (words(seed, stream + 2, count, k // 2) % 4 == 0).long()
            bits[:, 1::2] = bits[:, 0 : k // 2 * 2 : 2] ^ flipped
            if stream == 1:
                bits[:, 1::2] ^= 0x8000
        if family.zeros:
            bits[words(seed, stream + 4, count, k) % 2 == 0] &= 0x8000
        if family.special:
            chosen = words(seed, stream + 6, count, k) % SPECIAL_ONE_IN
            bits[chosen < 2] |= 0x7F80  # NaN, and infinity where the value was ±0
        found.append(bits.to(torch.int16).view(torch.bfloat16))
    return found[0], found[1]


def edges() -> tuple[torch.Tensor, torch.Tensor]:
    """a, b [64, 16] bf16: a row of b is 2^-75, 2^-76, … 2^-last and 2^-last once more, a row of a is 2^-75 … 2^-72.

    So each sum is 2^-149 … 2^-146 if every place of it is kept, and less by one of the smallest subnormals if the last ones are not.
    """
    scale, last = torch.arange(64) // 16 - 75, torch.arange(64)[:, None] % 11 + 4
    places = torch.arange(16)
    b = torch.where(places <= last + 1, 2.0 ** -(75.0 + torch.minimum(places, last)), 0.0)
    return (2.0**scale)[:, None].expand(-1, 16).bfloat16(), b.bfloat16()


def accumulators(family: Family, seed: int, *shape: int) -> torch.Tensor:
    """fp32 values from 2^-40 to 2^40 times the size of the family's products; one in 16 is ±0."""
    word, other = words(seed, 8, *shape), words(seed, 9, *shape)
    middle = sum(family.x) // 2 + sum(family.w) // 2 - 127
    field = (other % 81 + middle - 40).clamp(0, 254)
    bits = (word & 0x807FFFFF) | field << 23
    bits[(other >> 16) % 16 == 0] &= 0x80000000
    return bits.to(torch.int32).view(torch.float32)


@dataclass(frozen=True)
class Golden:
    """One recorded product: x·wᵀ of [rows, k] and [columns, k] in ``splits`` leaves; splits 0: dyᵀ·x over the tokens of TOKENS."""

    family: str
    rows: int
    columns: int
    k: int
    splits: int
    fp32: bool

    @property
    def name(self) -> str:
        order = f"{self.splits} leaves" if self.splits else "tokens"
        return f"{self.family}, {self.rows}x{self.columns}x{self.k}, {order}, {'fp32' if self.fp32 else 'bf16'}"

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        family = next(f for f in FAMILIES if f.name == self.family)
        if self.splits:
            return operands(family, 1, self.rows, self.columns, self.k)
        x, dy = operands(family, 1, self.columns, self.rows, sum(TOKENS))
        return x.T.contiguous(), dy.T.contiguous()

    def oracle(self) -> torch.Tensor:
        """What the oracle says a card gives."""
        x, other = self.operands()
        if self.splits:
            return hopper.det_gemm(x, other, self.splits, torch.float32 if self.fp32 else torch.bfloat16)
        leaves = golden_leaves()
        return hopper.det_gemm_weight_grad(x, other, torch.tensor(leaves.index), torch.tensor(leaves.offsets))


def digest(values: torch.Tensor) -> str:
    """SHA-256 of the bytes."""
    return hashlib.sha256(values.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def golden_leaves() -> TokenLeaves:
    """Token leaves of the recorded weight gradients."""
    return token_leaves(TOKENS)


GOLDEN = (
    *(Golden(f.name, 5, 24, k, splits, True) for f in FAMILIES for k, splits in ((16, 1), (256, 1), (512, 8))),
    *(Golden(f.name, 24, 40, 0, 0, True) for f in FAMILIES[:4]),
    Golden("random", 59, 96, 4096, 1, False),
    Golden("random", 59, 96, 4096, 8, False),
    Golden("cancelling", 17, 64, 4096, 8, True),
    Golden("random", 129, 64, 12288, 1, False),
    Golden("random", 16, 64, 12288, 8, True),
    Golden("wide", 64, 64, 12288, 8, True),
    Golden("random", 9, 33, 72, 1, True),
    Golden("cancelling", 9, 33, 200, 1, True),
)
