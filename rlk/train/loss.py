"""GRPO loss per token together with its derivative; every scalar in fp64, in token order.

Loss and slope are written side by side so that the normalisation by active tokens happens once, in fp64, before the first rounding.
Sources: Shao et al. 2024 (GRPO, eq. 3 and 4); Schulman et al. 2017 (clip, eq. 7); Schulman 2020 (k3 estimator of the KL divergence).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlk.contract.update import GrpoParams, group_advantages


class LossError(ValueError):
    """Rewards or scores that cannot give a loss; the message names them."""


@dataclass(frozen=True)
class TokenTerm:
    """One token before normalisation: loss and its derivative by the token's logprob; KL estimate; whether the clip took the gradient."""

    loss: float
    slope: float
    kl: float
    clipped: bool


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


def token_term(logp: float, old: float, reference: float | None, advantage: float, params: GrpoParams) -> TokenTerm:
    """-min(r·A, clip(r)·A) + kl_coef·(exp(d) - d - 1), r = exp(logp - old), d = reference - logp.

    logp, old: the trainer's own scores now and before the update. reference: the frozen model's score; without one there is no KL term.
    Raises LossError where a score is so far off that the result is not finite.
    """
    try:
        ratio = math.exp(logp - old)
        growth = 0.0 if reference is None else math.expm1(reference - logp)
    except OverflowError:
        raise LossError(f"logprob {logp} is too far from old {old} or reference {reference}: score with the weights at hand") from None
    held = min(max(ratio, 1 - params.clip_low), 1 + params.clip_high) * advantage
    free = ratio * advantage
    clipped = held < free
    kl = 0.0 if reference is None else growth - (reference - logp)
    loss = -(held if clipped else free) + params.kl_coef * kl
    slope = -(0.0 if clipped else free) - params.kl_coef * growth
    if not math.isfinite(loss) or not math.isfinite(slope):
        raise LossError(f"loss {loss} with slope {slope} at logprob {logp}, old {old}, reference {reference}, advantage {advantage}")
    return TokenTerm(loss, slope, kl, clipped)
