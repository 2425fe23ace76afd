"""Constants and scalar formulas of loss, gradient norm and optimizer step; the tensors live in ``rlk.train``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlk.contract.numerics import ContractError, round_fp32

NORM_BLOCK = 1024
"""Elements of one (tensor, shard) whose squares one fp64 row tree adds before block sums, shards and tensors are joined."""

MAX_GRAD_NORM = 1.0
NORM_EPS = 1e-6


@dataclass(frozen=True)
class AdamStep:
    """Scalars of one step, each an exact fp32 value. Hand the divisors to torch as fp32 tensors, never as Python numbers.

    In fp32, each operation rounded, no FMA, left to right:
    m = beta1·m + (1-beta1)·g;  v = beta2·v + ((1-beta2)·g)·g;
    w = w - lr·((m/correction1) / (sqrt(v/correction2) + eps) + weight_decay·w).
    """

    lr: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    correction1: float
    correction2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class AdamParams:
    """AdamW with decoupled decay (Loshchilov & Hutter 2019, algorithm 2). weight_decay applies to matrices, never to norm gains.

    At lr 5e-7 few bf16 weights change in a step: runs of a tiny model, which must see its hash change, use a larger one.
    """

    lr: float = 5e-7
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ContractError(f"{name}={getattr(self, name)} is outside [0, 1): use a decay below 1")
        for name in ("lr", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ContractError(f"{name}={getattr(self, name)} is not a positive finite number: give one above 0")
        if not 0 <= self.weight_decay < math.inf:
            raise ContractError(f"weight_decay={self.weight_decay} is not a finite number >= 0: use 0 for none")

    def step(self, number: int) -> AdamStep:
        """Scalars of step ``number`` (1 is the first); computed in fp64, each rounded to fp32 once."""
        if number < 1:
            raise ContractError(f"optimizer step {number}: the first step is 1")
        return AdamStep(
            lr=round_fp32(self.lr),
            beta1=round_fp32(self.beta1),
            one_minus_beta1=round_fp32(1 - self.beta1),
            beta2=round_fp32(self.beta2),
            one_minus_beta2=round_fp32(1 - self.beta2),
            correction1=round_fp32(1 - self.beta1**number),
            correction2=round_fp32(1 - self.beta2**number),
            eps=round_fp32(self.eps),
            weight_decay=round_fp32(self.weight_decay),
        )


@dataclass(frozen=True)
class GrpoParams:
    """Group-relative policy optimisation (Shao et al. 2024, eq. 3) with the asymmetric clip of DAPO, normalised by active tokens.

    Per response token: -min(r·A, clip(r, 1-clip_low, 1+clip_high)·A) + kl_coef·(exp(d) - d - 1), r = exp(logp - old), d = ref - logp;
    summed in fp64 in token order and divided by the active tokens of the whole batch, over all ranks and micro-batches, before the first
    bf16 derivative.
    """

    group_size: int = 8
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ContractError(f"group_size={self.group_size} holds no sample: use 1 or more")
        for name in ("clip_low", "clip_high", "kl_coef"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ContractError(f"{name}={getattr(self, name)} is not a finite number >= 0: use 0 or more")


ADVANTAGE_EPS = 1e-6


def group_advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """(reward - mean) / (std + 1e-6) of the samples of one prompt; fp64, sample order, std over the group size. Equal rewards give +0."""
    if not rewards or not all(math.isfinite(r) for r in rewards):
        raise ContractError(f"rewards {list(rewards)} are empty or not finite: score every sample of the group")
    if min(rewards) == max(rewards):
        return (0.0,) * len(rewards)  # the mean of equal values may be off by a rounding
    mean = _ordered_sum(rewards) / len(rewards)
    centred = [r - mean for r in rewards]
    std = math.sqrt(_ordered_sum([c * c for c in centred]) / len(rewards))
    return tuple(c / (std + ADVANTAGE_EPS) for c in centred)


def _ordered_sum(values: Sequence[float]) -> float:
    """Left to right from +0; the built-in ``sum`` compensates its rounding since Python 3.12."""
    total = 0.0
    for value in values:
        total += value
    return total


def clip_scale(norm: float, max_norm: float = MAX_GRAD_NORM) -> float:
    """fp32 factor of every gradient, fp32(max_norm/(norm + 1e-6)) where that is below 1, else exactly 1; a non-finite norm raises."""
    if not math.isfinite(norm) or norm < 0:
        raise ContractError(
            f"gradient norm {norm} is not a finite number >= 0: find the first non-finite gradient, the step is not applied"
        )
    return min(1.0, round_fp32(max_norm / (norm + NORM_EPS)))
