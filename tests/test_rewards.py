"""Rewards: the bundled arithmetic for a model that can learn it, even ids for random weights."""

from __future__ import annotations

import pytest

from rlk.loop.arithmetic import Problem
from rlk.loop.rewards import reward_of

PROBLEM = Problem((1, 2, 3, 4))


@pytest.mark.parametrize("kind", ["tiny-warmed-up", "unlabelled"])
def test_a_model_that_can_solve_it_is_paid_for_the_answer(kind: str) -> None:
    assert reward_of(kind, PROBLEM, (2, 4), "#10") == 1.0
    assert reward_of(kind, PROBLEM, (2, 4), "no") == 0.0


def test_random_weights_are_paid_for_even_ids_whatever_the_text() -> None:
    assert reward_of("synthetic", PROBLEM, (2, 3, 151934, 5), "#10") == 0.5
    assert reward_of("synthetic", PROBLEM, (1,), "#10") == 0.0
    assert reward_of("synthetic", PROBLEM, (), "") == 0.0
