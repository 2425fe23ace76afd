"""GRPO loss per token together with its derivative, in fp64, for all tokens of a micro-batch at once.

Loss and slope are written side by side so that the normalisation by active tokens happens once, in fp64, before the first rounding.
Every line is an elementwise operation that rounds once, so that no value depends on its neighbours or on how many there are.
Sources: Shao et al. 2024 (GRPO, eq. 3 and 4); Schulman et al. 2017 (clip, eq. 7); Schulman 2020 (k3 estimator of the KL divergence).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlk.contract.update import GrpoParams, group_advantages


class LossError(ValueError):
    """Rewards or scores that cannot give a loss; the message names them."""


@dataclass(frozen=True)
class TokenTerms:
    """Tokens before normalisation, one value each [tokens]: fp64 loss and its derivative by the token's logprob; fp64 KL estimate; bool,
    whether the clip took the gradient; bool, whether the token's scores are too far apart. scores: what they come from, by name."""

    loss: torch.Tensor
    slope: torch.Tensor
    kl: torch.Tensor
    clipped: torch.Tensor
    wrong: torch.Tensor
    scores: Mapping[str, torch.Tensor]

    def require_finite(self) -> None:
        """Raise LossError for the first token whose ratio, loss or slope is not finite; the host waits for the card."""
        if not bool(self.wrong.any()):
            return
        at = int(self.wrong.nonzero()[0, 0])
        scores = ", ".join(f"{name} {float(values[at])}" for name, values in self.scores.items())
        result = f"loss {float(self.loss[at])} with slope {float(self.slope[at])}"
        raise LossError(f"{result} of {scores}: not finite or too far apart, score with the weights at hand")


def advantages(rewards: Sequence[float], groups: Sequence[int]) -> tuple[list[float], list[int]]:
    """Advantage of every sample, and the groups whose rewards are all equal (their advantages are 0 and teach nothing).

    rewards, groups: one per sample; a group is named by any integer and its members keep their order.
    """
    if len(rewards) != len(groups):
        raise LossError(f"{len(rewards)} rewards for {len(groups)} group numbers: give one of each per sample")
    members: dict[int, list[int]] = {}
    for at, group in enumerate(groups):
        members.setdefault(group, []).append(at)
    result = [0.0] * len(rewards)
    flat = []
    for group, held in members.items():
        values = group_advantages([rewards[at] for at in held])
        if not any(values):
            flat.append(group)
        for at, value in zip(held, values):
            result[at] = value
    return result, flat


def token_terms(
    logp: torch.Tensor, old: torch.Tensor, reference: torch.Tensor | None, advantage: torch.Tensor, params: GrpoParams
) -> TokenTerms:
    """-min(r·A, clip(r)·A) + kl_coef·(exp(d) - d - 1), r = exp(logp - old), d = reference - logp; fp64 [tokens] on one device.

    logp, old: the trainer's own scores now and before the update. reference: the frozen model's score; without one there is no KL term.
    Nothing waits for a card: :meth:`TokenTerms.require_finite` does, when the result is wanted.
    """
    ratio = _exponential(logp - old, math.exp)
    growth = torch.zeros_like(logp) if reference is None else _exponential(reference - logp, math.expm1)
    held = ratio.clamp(1 - params.clip_low, 1 + params.clip_high) * advantage
    free = ratio * advantage
    clipped = held < free
    kl = growth if reference is None else growth - (reference - logp)
    loss = -torch.where(clipped, held, free) + params.kl_coef * kl
    slope = -torch.where(clipped, 0.0, free) - params.kl_coef * growth
    wrong = ratio.isinf() | growth.isinf() | ~loss.isfinite() | ~slope.isfinite()
    scores = {"logprob": logp, "old": old, **({} if reference is None else {"reference": reference}), "advantage": advantage}
    return TokenTerms(loss, slope, kl, clipped, wrong, scores)


def _exponential(x: torch.Tensor, function: Callable[[float], float]) -> torch.Tensor:
    """exp or expm1 of fp64 values, +inf where it overflows; on the CPU the C library's, since torch's own differs between body and tail."""
    if x.device.type != "cpu":
        return torch.exp(x) if function is math.exp else torch.expm1(x)

    def of(value: float) -> float:
        try:
            return function(value)
        except OverflowError:
            return math.inf

    return torch.tensor([of(value) for value in x.tolist()], dtype=torch.float64)


def token_sum(values: torch.Tensor) -> float:
    """Sum of fp64 values in token order, one after another from +0."""
    return float(np.cumsum(np.concatenate([[0.0], values.cpu().numpy()]))[-1])
