"""The bundled task: reproducible problems, consistent solutions, rewards that cannot be had by accident."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk.loop.arithmetic import Problem, problems, reward, worked_solution

SUMS = Problem((3, 8, 5, 9))


def test_the_written_form() -> None:
    assert SUMS.prompt == "Add step by step: 3+8+5+9\n"
    assert SUMS.answer == "25"
    assert worked_solution(SUMS) == "3+8=11;11+5=16;16+9=25;#25"
    assert worked_solution(SUMS, (0, -1, 0)) == "3+8=11;11+5=15;15+9=24;#24"
    with pytest.raises(ValueError):
        worked_solution(SUMS, (0,))


def test_problems_are_the_same_for_a_seed_everywhere_and_extend_each_other() -> None:
    assert [p.terms for p in problems(3, 0)] == [(8, 9, 4, 1), (3, 4, 8, 2), (2, 5, 4, 5)]
    assert problems(5, 1) == problems(50, 1)[:5]
    assert problems(50, 1) != problems(50, 2)
    assert problems(0, 1) == []
    with pytest.raises(ValueError, match="count=-1"):
        problems(-1, 0)


def test_problems_cover_the_digits_and_share_a_page_of_prompt() -> None:
    many = problems(300, 7)
    assert {term for p in many for term in p.terms} == set(range(1, 10))
    assert len(set(many)) > 250
    assert len({p.prompt[:16] for p in many}) == 1
    assert {len(p.prompt) for p in many} == {26}
    assert all(20 <= len(worked_solution(p)) <= 30 for p in many)


@given(st.integers(0, 10_000))
def test_a_worked_solution_earns_everything_and_a_slip_the_format_only(seed: int) -> None:
    problem = problems(1, seed)[0]
    assert reward(problem, worked_solution(problem)) == 1.0
    assert reward(problem, worked_solution(problem, (0, 1, 0))) == 0.1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("#25", 1.0),
        ("3+8=99;#25", 1.0),
        ("3+8=11;11+5=16;16+9=26;#26", 0.1),
        ("3+8=11;11+5=16;16+9=25;#025", 0.1),
        ("3+8=11;11+5=16;16+9=25;#25\n", 0.0),
        ("3+8=11;11+5=16;16+9=25;#25;", 0.0),
        ("3+8=11;11+5=16;16+9=25;", 0.0),
        ("#24", 0.0),
        ("25", 0.0),
        ("#\u0662\u0665", 0.0),
        ("", 0.0),
    ],
)
def test_reward_table(text: str, expected: float) -> None:
    assert reward(SUMS, text) == expected
