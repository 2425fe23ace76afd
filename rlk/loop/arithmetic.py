"""The bundled task: add four digits from left to right, in written steps. Deterministic, byte-sized, checkable without a model.

    prompt    Add step by step: 3+8+5+9
    response  3+8=11;11+5=16;16+9=25;#25

All prompts share their first 16 bytes and more, so that a prefix cache with pages of 16 tokens is hit in every rollout.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

TERMS = 4
_FORMAT = re.compile(r"(?:[0-9]+\+[0-9]+=[0-9]+;)+#[0-9]+")
_ANSWER = re.compile(r"#([0-9]+)\Z")


@dataclass(frozen=True)
class Problem:
    """One task: the numbers to add (each 1…9), the prompt that states it and the decimal answer."""

    terms: tuple[int, ...]

    @property
    def prompt(self) -> str:
        """The text that the model continues."""
        return "Add step by step: " + "+".join(map(str, self.terms)) + "\n"

    @property
    def answer(self) -> str:
        """The right total in decimal digits."""
        return str(sum(self.terms))


def problems(count: int, seed: int) -> list[Problem]:
    """The first ``count`` problems of the stream named by ``seed``: the same on every machine, and a longer list extends a shorter one."""
    if count < 0:
        raise ValueError(f"problems: count={count} must not be negative")
    digests = (hashlib.sha256(f"arithmetic {seed} {index}".encode()).digest() for index in range(count))
    digit = lambda digest, term: 1 + int.from_bytes(digest[8 * term : 8 * term + 8], "big") % 9
    return [Problem(tuple(digit(digest, term) for term in range(TERMS))) for digest in digests]


def worked_solution(problem: Problem, slips: Sequence[int] = (0,) * (TERMS - 1)) -> str:
    """The written steps and the total, as a response should read.

    slips: an error added to the sum of each step (0 = right); later steps and the total continue from the wrong sum.
    """
    total, steps = problem.terms[0], ""
    for term, slip in zip(problem.terms[1:], slips, strict=True):
        result = total + term + slip
        steps += f"{total}+{term}={result};"
        total = result
    return f"{steps}#{total}"


def reward(problem: Problem, text: str) -> float:
    """1.0 for the right final answer, 0.1 for a wrong one in the right format, else 0.0."""
    final = _ANSWER.search(text)
    if final is not None and final.group(1) == problem.answer:
        return 1.0
    return 0.1 if _FORMAT.fullmatch(text) else 0.0
