"""The loss of one batch over all of its micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlk.contract.update import GrpoParams
from rlk.train.batch import MicroBatch, Sample, on_device
from rlk.train.loss import LossError, TokenTerms, advantages, token_sum, token_terms

Scores = Sequence[Sequence[float]]


@dataclass(frozen=True)
class LossSummary:
    """Figures of one batch. loss, kl, clip_fraction: means over its active tokens. rewards: over its samples (std with divisor n).

    flat_groups: groups whose rewards are all equal, which teach nothing. empty_samples: ids of samples without a response token,
    which take part in their group's advantages and in nothing else.
    """

    loss: float
    kl: float
    clip_fraction: float
    tokens: int
    reward_mean: float
    reward_std: float
    reward_min: float
    reward_max: float
    flat_groups: tuple[int, ...]
    empty_samples: tuple[int, ...]


class BatchLoss:
    """GRPO over samples in id order; all arguments are aligned with ``samples``, which may come in any order.

    rewards, groups: one per sample. old, reference: one score per response token, by this trainer before the update and by its frozen
    weights; the rollout's logprobs have no place here. Raises LossError on a misaligned or missing value and on a batch without a token.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        rewards: Sequence[float],
        groups: Sequence[int],
        old: Scores,
        reference: Scores | None,
        params: GrpoParams,
    ) -> None:
        if not len(samples) == len(rewards) == len(groups) == len(old) == (len(samples) if reference is None else len(reference)):
            raise LossError(f"{len(samples)} samples need one reward, group, old score list and reference score list each")
        if reference is None and params.kl_coef:
            raise LossError(f"kl_coef={params.kl_coef} needs the reference model's scores: pass reference_scores")
        for name, scores in (("old", old), ("reference", reference or old)):
            for sample, values in zip(samples, scores):
                if len(values) != len(sample.response.token_ids):
                    raise LossError(f"sample {sample.sample_id}: {len(values)} {name} scores for {len(sample.response.token_ids)} tokens")
        self.params = params
        self.tokens = sum(len(sample.response.token_ids) for sample in samples)
        if not self.tokens:
            raise LossError("no sample of the batch has a response token: there is nothing to learn from")
        order = sorted(range(len(samples)), key=lambda at: samples[at].sample_id)
        self._rewards = [rewards[at] for at in order]
        weights, self._flat = advantages(self._rewards, [groups[at] for at in order])
        ids = [samples[at].sample_id for at in order]
        self._advantage = dict(zip(ids, weights))
        self._old = {samples[at].sample_id: old[at] for at in order}
        self._reference = None if reference is None else {samples[at].sample_id: reference[at] for at in order}
        # By the first sample of a micro-batch, whose samples have contiguous ids.
        self._terms: dict[int, TokenTerms] = {}

    def seeds(self, batch: MicroBatch, scores: torch.Tensor) -> torch.Tensor:
        """dL/dlogp of every target of a micro-batch from its fresh scores, divided by the active tokens of the whole batch; both fp64 or
        fp32 in, fp64 out, [tokens] on the scores' device, for which the host does not wait: :meth:`summary` refuses what is not finite."""
        ids = [sample.sample_id for sample in batch.samples]
        on = lambda values: on_device(torch.from_numpy(np.concatenate(values)), scores.device)
        tokens = lambda of: on([np.array(of[i], dtype=np.float64) for i in ids])
        frozen = None if self._reference is None else tokens(self._reference)
        advantage = on([np.full(len(self._old[i]), self._advantage[i]) for i in ids])
        terms = token_terms(scores.double(), tokens(self._old), frozen, advantage, self.params)
        self._terms[ids[0]] = terms
        return terms.slope / self.tokens

    def summary(self) -> LossSummary:
        """Figures after every micro-batch has been through :meth:`seeds`; sums in token order. Raises LossError on a token whose terms
        are not finite."""
        terms = [self._terms[first] for first in sorted(self._terms)]
        for term in terms:
            term.require_finite()
        scored = sum(term.loss.numel() for term in terms)
        if scored != self.tokens:
            raise LossError(f"{scored} of {self.tokens} tokens have been scored: run every micro-batch before the summary")
        mean = _sum(self._rewards) / len(self._rewards)
        return LossSummary(
            loss=token_sum(torch.cat([term.loss for term in terms])) / self.tokens,
            kl=token_sum(torch.cat([term.kl for term in terms])) / self.tokens,
            clip_fraction=int(torch.cat([term.clipped for term in terms]).count_nonzero()) / self.tokens,
            tokens=self.tokens,
            reward_mean=mean,
            reward_std=math.sqrt(_sum([(r - mean) * (r - mean) for r in self._rewards]) / len(self._rewards)),
            reward_min=min(self._rewards),
            reward_max=max(self._rewards),
            flat_groups=tuple(self._flat),
            empty_samples=tuple(i for i, held in self._old.items() if not held),
        )


def _sum(values: Sequence[float]) -> float:
    # The built-in sum compensates from Python 3.12 on, so its result depends on the version.
    total = 0.0
    for value in values:
        total += value
    return total
