"""The strict sampler: truncation, draws, independence of the batch, and supports that the trainer scores to the same bytes."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from rlk.contract.numerics import DEFAULT
from rlk.contract.sampling import SamplingParams
from rlk.kernels.dispatch import readback, reset_readback
from rlk.kernels.logp import logp, support_mask
from rlk.kernels.sampling import cpu as rule
from rlk.rollout.sampling import Sampled, draw, retained_ids, sample_rows

VOCAB, PADDED = 301, 1024


def _logits(rows: int, width: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(23))


def _sample(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> Sampled:
    return sample_rows(logits, params, positions, vocab_size=VOCAB, padded_vocab=PADDED, numerics=DEFAULT)


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def _row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32)


def _expected_support(row: torch.Tensor, params: SamplingParams) -> list[int]:
    """Truncation written out over Python numbers."""
    t = (row / torch.tensor([params.temperature])).tolist()
    order = sorted(range(len(t)), key=lambda i: (-t[i], i))
    if params.top_k > 0:
        order = order[: params.top_k]
    weight = {i: math.exp(t[i] - max(t)) for i in order}
    kept, mass = [], 0.0
    for i in order:
        kept.append(i)
        mass += weight[i]
        if params.top_p < 1 and mass >= params.top_p * math.fsum(weight.values()):
            break
    return sorted(kept)


def test_retained_ids_follow_top_k_then_top_p(mixed: list[SamplingParams]) -> None:
    truncating = [params for params in mixed if params.truncates]
    assert len(truncating) == 4
    for params, row in itertools.product(truncating, _logits(50)):
        assert retained_ids(row, params) == _expected_support(row, params)


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    row = _row(0.4, 0.3, 0.2, 0.1).log()
    assert retained_ids(row, SamplingParams(top_p=0.5)) == [0, 1]
    assert retained_ids(row, SamplingParams(top_p=0.5, top_k=2)) == [0]


def test_temperature_comes_before_top_p() -> None:
    row = _row(2.0, 1.0, 0.0)
    assert retained_ids(row, SamplingParams(top_p=0.8)) == [0, 1]
    assert retained_ids(row, SamplingParams(top_p=0.8, temperature=0.5)) == [0]


def test_ties_go_to_the_lower_id() -> None:
    row = _row(1.0, 2.0, 2.0, 2.0, -0.0, 0.0)
    assert retained_ids(row, SamplingParams(top_k=2)) == [1, 2]
    assert retained_ids(row, SamplingParams(top_k=5)) == [0, 1, 2, 3, 4]
    assert retained_ids(torch.zeros(4), SamplingParams(top_p=0.5)) == [0, 1]
    assert draw(row, SamplingParams(temperature=0), None, 0) == 1


def test_edges_of_truncation() -> None:
    row = _logits(1)[0]
    top = int(row.argmax())
    assert retained_ids(row, SamplingParams(top_k=1)) == [top]
    assert retained_ids(row, SamplingParams(top_p=1e-9)) == [top]
    assert retained_ids(row, SamplingParams(top_k=VOCAB + 5)) == list(range(VOCAB))
    assert retained_ids(row, SamplingParams()) is None
    assert retained_ids(row, SamplingParams(temperature=0, top_k=3)) is None
    sampled = _sample(_logits(3), [SamplingParams(top_k=1, seed=s) for s in range(3)], [0, 1, 2])
    assert sampled.ids.tolist() == _logits(3).argmax(1).tolist()
    assert _same(sampled.logprobs, torch.zeros(3))


@pytest.mark.parametrize("first", [1, 7, 64])
def test_partial_sort_changes_nothing(monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    cases = [(row, SamplingParams(top_p=p)) for row in _logits(8) for p in (0.1, 0.5, 0.99, 1 - 1e-12)]
    expected = [retained_ids(row, params) for row, params in cases]
    monkeypatch.setattr(rule, "FIRST_CANDIDATES", first)
    assert [retained_ids(row, params) for row, params in cases] == expected


def test_draws_have_the_distribution() -> None:
    row = _row(0.4, 0.3, 0.2, 0.1).log()
    draws = 4000
    for params_of, weights in (
        (lambda seed: SamplingParams(seed=seed), [0.4, 0.3, 0.2, 0.1]),
        (lambda seed: SamplingParams(seed=seed, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (lambda seed: SamplingParams(seed=seed, temperature=0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
    ):
        retained = retained_ids(row, params_of(0))
        for by_seed in (True, False):
            drawn = (draw(row, params_of(i if by_seed else 9), retained, 3 if by_seed else i) for i in range(draws))
            counts = Counter(drawn)
            for token, weight in enumerate(weights):
                assert abs(counts[token] - draws * weight) <= 4 * math.sqrt(draws * weight * (1 - weight))


def test_probability_zero_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    row = _row(-2000.0, 1.0, -2000.0, 0.0, -2000.0)

    class Extreme:
        raw = 0

        def __init__(self, key: int, counter: int) -> None: ...

        def random_raw(self) -> int:
            return self.raw

    monkeypatch.setattr(np.random, "Philox", Extreme)
    for Extreme.raw, expected in ((0, 1), (2**64 - 1, 3)):
        assert draw(row, SamplingParams(), None, 0) == expected
        assert draw(row, SamplingParams(top_k=5), [0, 1, 2, 3, 4], 0) == expected


def test_a_group_of_samples_differs_and_the_same_seeds_repeat_it() -> None:
    logits = _logits(12)

    def response(seed: int) -> list[int]:
        return [draw(row, SamplingParams(seed=seed), None, position) for position, row in enumerate(logits)]

    group = [response(seed) for seed in range(8)]
    assert len({tuple(tokens) for tokens in group}) == 8
    assert [response(seed) for seed in range(8)] == group
    flat = torch.zeros(VOCAB)
    assert len({draw(flat, SamplingParams(seed=0), None, position) for position in range(8)}) > 1


def test_row_does_not_depend_on_the_batch(mixed: list[SamplingParams]) -> None:
    rows = 4 * len(mixed)
    logits, params, positions = _logits(rows), mixed * 4, list(range(rows))
    whole = _sample(logits, params, positions)
    for i in range(rows):
        alone = _sample(logits[i : i + 1].clone(), params[i : i + 1], positions[i : i + 1])
        assert alone.ids[0] == whole.ids[i] == draw(logits[i], params[i], retained_ids(logits[i], params[i]), positions[i])
        assert _same(alone.logprobs, whole.logprobs[i : i + 1])
        assert alone.supports[0] == whole.supports[i]
    back = _sample(logits.flip(0), params[::-1], positions[::-1])
    assert torch.equal(back.ids.flip(0), whole.ids)
    assert _same(back.logprobs.flip(0), whole.logprobs)


@pytest.mark.parametrize("width", [VOCAB, PADDED])
def test_the_trainer_scores_the_same_bytes(width: int, mixed: list[SamplingParams]) -> None:
    logits = torch.full((len(mixed), width), math.nan)
    logits[:, :VOCAB] = _logits(len(mixed))
    reset_readback()
    sampled = _sample(logits, mixed, [4] * len(mixed))
    assert [(ran.op, ran.calls) for ran in readback()] == [("logp", 1)]
    temperature = torch.tensor([p.scoring_temperature for p in mixed])
    support = support_mask(sampled.supports, VOCAB)
    again = logp(logits[:, :VOCAB], sampled.ids, temperature, vocab_size=VOCAB, padded_vocab=PADDED, support=support)
    assert _same(again, sampled.logprobs)
    assert (sampled.logprobs <= 0).all()
    for wrong in (  # what a trainer gets that rescores at T = 1, or over the whole vocabulary
        logp(logits, sampled.ids, torch.ones(len(mixed)), vocab_size=VOCAB, padded_vocab=PADDED),
        logp(logits, sampled.ids, temperature, vocab_size=VOCAB, padded_vocab=PADDED),
    ):
        assert not _same(wrong[2:], sampled.logprobs[2:])


def test_greedy_takes_the_argmax_and_is_scored_at_one() -> None:
    logits = _logits(4)
    sampled = _sample(logits, [SamplingParams(temperature=0, top_p=0.2, top_k=3)] * 4, [0] * 4)
    assert sampled.ids.tolist() == logits.argmax(1).tolist()
    assert sampled.supports == [None] * 4
    torch.testing.assert_close(sampled.logprobs, logits.log_softmax(1).max(1).values, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_name_their_row(bad: float, mixed: list[SamplingParams]) -> None:
    logits = _logits(5)
    logits[3, 7] = bad
    for params in mixed:
        with pytest.raises(FloatingPointError, match="row 3"):
            _sample(logits, [params] * 5, [0] * 5)
        with pytest.raises(FloatingPointError):
            retained_ids(logits[3], params)
        with pytest.raises(FloatingPointError):
            draw(logits[3], params, None, 0)


def test_arguments_must_match(mixed: list[SamplingParams]) -> None:
    for logits, params, positions in (
        (_logits(2), mixed[:1], [0, 0]),
        (_logits(2), mixed[:2], [0]),
        (_logits(2, VOCAB - 1), mixed[:2], [0, 0]),
    ):
        with pytest.raises(ValueError, match="sample_rows"):
            _sample(logits, params, positions)


def test_inference_mode_and_no_rows(mixed: list[SamplingParams]) -> None:
    expected = _sample(_logits(6), mixed, [0] * 6)
    with torch.inference_mode():
        sampled = _sample(_logits(6), mixed, [0] * 6)
        assert _same(sampled.logprobs, expected.logprobs)
    assert torch.equal(sampled.ids, expected.ids)
    none = _sample(_logits(0), [], [])
    assert none.ids.shape == none.logprobs.shape == (0,)
