"""GRPO by hand: advantages, clipped loss, KL estimate, normalisation, and what must be refused."""

from __future__ import annotations

import math
import re

import pytest
import torch

from rlk.contract.numerics import DEFAULT, round_fp32
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.contract.update import GrpoParams
from rlk.train.batch import Sample, micro_batch, micro_batches
from rlk.train.loss import LossError, TokenTerms, advantages, token_sum, token_terms
from rlk.train.objective import BatchLoss

PARAMS = GrpoParams(clip_low=0.2, clip_high=0.2, kl_coef=0.1)


def term_of(logp: float, old: float, reference: float | None, advantage: float) -> TokenTerms:
    """One token among others, whose values do not matter to it."""
    row = lambda value: torch.tensor([-0.5, value, -0.7], dtype=torch.float64)
    made = token_terms(row(logp), row(old), None if reference is None else row(reference), row(advantage), PARAMS)
    made.require_finite()
    return TokenTerms(made.loss[1], made.slope[1], made.kl[1], made.clipped[1], made.wrong[1], {})


def sample(sample_id: int, answer: int, logprob: float = 0.0) -> Sample:
    prompt, ids = (1, 2), tuple(range(3, 3 + answer))
    response = Response(sample_id, prompt, ids, (logprob,) * answer, None, "length", 0, 0)
    return Sample(Request(sample_id, prompt, SamplingParams()), response)


def test_advantages_within_groups() -> None:
    values, flat = advantages([1.0, 5.0, 0.0, 5.0, 0.0], [7, 3, 7, 3, 7])
    std = math.sqrt(2 / 9)
    assert values[0] == pytest.approx((2 / 3) / (std + 1e-6), rel=1e-12)
    assert values[2] == values[4] == pytest.approx((-1 / 3) / (std + 1e-6), rel=1e-12)
    assert (values[1], values[3], flat) == (0.0, 0.0, [3])


def test_equal_rewards_teach_nothing_at_all() -> None:
    # The mean of three 0.1 is 0.10000000000000002; what is left must not be blown up by the small standard deviation.
    for reward in (0.1, 1.0, 0.7, -3.3):
        values, flat = advantages([reward] * 3, [0] * 3)
        assert values == [0.0] * 3
        assert flat == [0]


def test_advantages_are_refused_without_alignment() -> None:
    with pytest.raises(LossError, match="2 rewards for 1 group"):
        advantages([1.0, 2.0], [0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.5, 2.0, -2.4, 0.0, True),  # gain beyond 1 + clip_high
        (0.5, 2.0, -1.0, -1.0, False),  # a loss of probability of a good token keeps its gradient
        (0.5, -2.0, 1.6, 0.0, True),  # below 1 - clip_low
        (1.5, -2.0, 3.0, 3.0, False),
    ],
)
def test_clip(ratio: float, advantage: float, loss: float, slope: float, clipped: bool) -> None:
    term = term_of(math.log(ratio) - 1.0, -1.0, None, advantage)
    assert (float(term.loss), float(term.slope)) == (pytest.approx(loss, abs=1e-12), pytest.approx(slope, abs=1e-12))
    assert (bool(term.clipped), float(term.kl)) == (clipped, 0.0)


def test_kl_estimate_and_its_derivative() -> None:
    term = term_of(-1.0, -1.0, -1.5, 0.0)
    kl = math.exp(-0.5) + 0.5 - 1
    assert float(term.kl) == pytest.approx(kl, rel=1e-12)
    assert float(term.loss) == pytest.approx(0.1 * kl, rel=1e-12)
    assert float(term.slope) == pytest.approx(0.1 * (1 - math.exp(-0.5)), rel=1e-12)
    assert float(term_of(-1.0, -1.0, -1.0, 0.0).kl) == 0.0


@pytest.mark.parametrize("logp", [-3.0, -1.2, -1.0, -0.9, -0.1])
@pytest.mark.parametrize("advantage", [-1.5, 0.0, 0.5])
def test_slope_is_the_derivative(logp: float, advantage: float) -> None:
    at = lambda value: float(term_of(value, -1.0, -0.7, advantage).loss)
    slope = float(term_of(logp, -1.0, -0.7, advantage).slope)
    assert slope == pytest.approx((at(logp + 1e-6) - at(logp - 1e-6)) / 2e-6, abs=1e-6)


def test_far_scores_are_refused() -> None:
    with pytest.raises(LossError, match="too far"):
        term_of(0.0, -1e4, None, 1.0)
    with pytest.raises(LossError, match="loss nan"):
        term_of(float("nan"), -1.0, None, 1.0)
    with pytest.raises(LossError, match=re.escape("logprob 0.0, old -10000.0, reference -1.0, advantage 1.0")):
        term_of(0.0, -1e4, -1.0, 1.0)


def test_a_batch_with_a_far_score_has_slopes_and_no_summary() -> None:
    loss = BatchLoss([sample(0, 2)], [1.0], [0], [[-1e4, -1.0]], None, GrpoParams())
    loss.seeds(micro_batch([sample(0, 2)], DEFAULT), torch.tensor([-1.0, -1.0]))
    with pytest.raises(LossError, match="too far apart"):
        loss.summary()


def test_terms_are_the_formula_on_python_numbers() -> None:
    """Bit for bit, however many tokens stand side by side."""
    generator = torch.Generator().manual_seed(1)
    draw = lambda: (torch.randn(1001, generator=generator) - 2).double()
    logp, old, reference, advantage = draw(), draw(), draw(), draw()
    made = token_terms(logp, old, reference, advantage, PARAMS)
    for at, (x, o, r, a) in enumerate(zip(logp.tolist(), old.tolist(), reference.tolist(), advantage.tolist())):
        ratio, growth = math.exp(x - o), math.expm1(r - x)
        held, free = min(max(ratio, 1 - 0.2), 1 + 0.2) * a, ratio * a
        kl = growth - (r - x)
        slope = -(0.0 if held < free else free) - 0.1 * growth
        expected = (-(held if held < free else free) + 0.1 * kl, slope, kl, held < free)
        assert expected == (float(made.loss[at]), float(made.slope[at]), float(made.kl[at]), bool(made.clipped[at]))
    total = 0.0
    for value in made.loss.tolist():
        total += value
    assert token_sum(made.loss) == total


def test_batch_by_hand() -> None:
    samples = [sample(1, 3), sample(0, 1), sample(2, 0)]
    old = [[-1.0, -2.0, -3.0], [-0.5], []]
    loss = BatchLoss(samples, [0.0, 1.0, 0.5], [0, 0, 0], old, old, PARAMS)
    fresh = {1: old[0], 0: old[1]}
    batches = micro_batches(samples, 1, DEFAULT)
    seeds = [value for batch in batches for value in loss.seeds(batch, torch.tensor(fresh[batch.samples[0].sample_id])).tolist()]
    std = math.sqrt((0.25 + 0.25) / 3)
    good, bad = 0.5 / (std + 1e-6), -0.5 / (std + 1e-6)
    assert seeds == pytest.approx([-good / 4] + [-bad / 4] * 3, rel=1e-12)
    summary = loss.summary()
    assert summary.loss == pytest.approx(-(good + 3 * bad) / 4, rel=1e-12)
    assert (summary.tokens, summary.clip_fraction, summary.kl) == (4, 0.0, 0.0)
    assert (summary.reward_mean, summary.reward_min, summary.reward_max) == (0.5, 0.0, 1.0)
    assert summary.reward_std == pytest.approx(std, rel=1e-12)
    assert (summary.flat_groups, summary.empty_samples) == ((), (2,))


def test_normalisation_counts_the_whole_batch_not_the_micro_batch() -> None:
    samples = [sample(0, 1), sample(1, 3)]
    old = [[-1.0], [-1.0] * 3]
    one = BatchLoss(samples, [1.0, 0.0], [0, 0], old, None, GrpoParams())
    two = BatchLoss(samples, [1.0, 0.0], [0, 0], old, None, GrpoParams())
    together = one.seeds(micro_batch(samples, DEFAULT), torch.tensor(old[0] + old[1])).tolist()
    apart = [two.seeds(micro_batch([s], DEFAULT), torch.tensor(scores)).tolist() for s, scores in zip(samples, old)]
    assert together == apart[0] + apart[1]


def test_rollout_logprobs_are_not_read() -> None:
    old = [[-1.0, -2.0]]
    seeds = []
    for logprob in (0.0, round_fp32(-7.7)):
        loss = BatchLoss([sample(0, 2, logprob)], [1.0], [0], old, [[-1.5, -1.5]], PARAMS)
        seeds.append(loss.seeds(micro_batch([sample(0, 2, logprob)], DEFAULT), torch.tensor([-1.1, -2.2])).tolist())
    assert seeds[0] == seeds[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": [1.0]}, "one reward"),
        ({"groups": [0, 0, 0]}, "one reward"),
        ({"old": [[-1.0], [-1.0]]}, "sample 1: 1 old scores for 2 tokens"),
        ({"reference": [[-1.0], [-1.0]]}, "sample 1: 1 reference scores for 2 tokens"),
        ({"reference": None}, "kl_coef=0.1 needs"),
    ],
)
def test_misaligned_batches_are_refused(change: dict, message: str) -> None:
    scores = [[-1.0], [-1.0, -1.0]]
    arguments = {"rewards": [1.0, 0.0], "groups": [0, 0], "old": scores, "reference": scores, **change}
    with pytest.raises(LossError, match=message):
        BatchLoss([sample(0, 1), sample(1, 2)], params=PARAMS, **arguments)


def test_batch_without_a_token_is_refused() -> None:
    with pytest.raises(LossError, match="nothing to learn"):
        BatchLoss([sample(0, 0)], [1.0], [0], [[]], None, GrpoParams())


def test_summary_before_every_micro_batch_is_refused() -> None:
    loss = BatchLoss([sample(0, 1), sample(1, 1)], [1.0, 0.0], [0, 0], [[-1.0], [-1.0]], None, GrpoParams())
    loss.seeds(micro_batch([sample(0, 1)], DEFAULT), torch.tensor([-1.0]))
    with pytest.raises(LossError, match="1 of 2 tokens"):
        loss.summary()
