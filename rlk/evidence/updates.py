"""Facts of an RL run per update: how cells of the integration scope hand them in, and how the report reads them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from pydantic import JsonValue

from rlk.evidence.schema import Comparison

_STEP = re.compile(r"\b(?:step|update)[ _-]?(\d+)\b")


@dataclass(frozen=True)
class Update:
    """One update of a run, numbered from 1; None or "" where nothing was recorded.

    tokens: response tokens compared between trainer and rollout.
    mismatched_bytes: over comparisons named ``update N …`` or ``step N …``, N from 1 (or throughout from 0).
    before, after: model hash that generated the samples, and after the optimizer step. published: hash of the written checkpoint.
    read_back: hash that the engine computed from the weights it holds.
    """

    step: int
    tokens: int | None = None
    mismatched_bytes: int | None = None
    reward: float | None = None
    kl: float | None = None
    before: str = ""
    after: str = ""
    published: str = ""
    read_back: str = ""


def facts_of(updates: Sequence[Update]) -> dict[str, JsonValue]:
    """The facts ``reward_per_step``, ``kl_per_step``, ``tokens_compared`` and ``model_hashes`` of a run, one entry per update."""
    hashes: list[JsonValue] = [{"before": u.before, "after": u.after, "published": u.published, "read_back": u.read_back} for u in updates]
    return {
        "reward_per_step": [u.reward for u in updates],
        "kl_per_step": [u.kl for u in updates],
        "tokens_compared": [u.tokens for u in updates],
        "model_hashes": hashes,
    }


def updates_of(facts: Mapping[str, JsonValue], comparisons: Sequence[Comparison]) -> list[Update]:
    """Read the facts of a run back.

    Also accepts ``model_hashes`` as one hash before the first and after every update, and ``tokens_compared`` as one number for the
    run; then the tokens of an update are the elements of its logprob comparisons.
    """
    rewards, divergences, tokens = (_numbers(facts.get(name)) for name in ("reward_per_step", "kl_per_step", "tokens_compared"))
    hashes = _hashes(facts.get("model_hashes"))
    named = [(int(found[1]), c) for c in comparisons if (found := _STEP.search(c.name))]
    first = min((step for step, _ in named), default=1)
    bytes_of: Counter[int] = Counter()
    logprobs_of: Counter[int] = Counter()
    for step, comparison in named:
        bytes_of[step + (first == 0)] += comparison.mismatched_bytes
        logprobs_of[step + (first == 0)] += comparison.elements if "logprob" in comparison.name else 0
    if not isinstance(facts.get("tokens_compared"), list):
        tokens = [float(logprobs_of[step]) or None for step in range(1, max(logprobs_of, default=0) + 1)]
    count = max(len(rewards), len(divergences), len(tokens), len(hashes), *bytes_of, 0)
    return [
        Update(
            step=step,
            tokens=None if (n := _at(tokens, step)) is None else int(n),
            mismatched_bytes=bytes_of.get(step),
            reward=_at(rewards, step),
            kl=_at(divergences, step),
            **(hashes[step - 1] if step <= len(hashes) else {}),
        )
        for step in range(1, count + 1)
    ]


def total_tokens(facts: Mapping[str, JsonValue]) -> int:
    """Tokens compared in a cell: the fact ``tokens_compared``, one number or one per update; 0 if absent."""
    return sum(int(n) for n in _numbers(facts.get("tokens_compared")) if n is not None)


def _numbers(value: JsonValue) -> list[float | None]:
    values = value if isinstance(value, list) else [value]
    return [float(v) if isinstance(v, int | float) else None for v in values] if value is not None else []


def _at(values: Sequence[float | None], step: int) -> float | None:
    return values[step - 1] if step <= len(values) else None


def _hashes(value: JsonValue) -> list[dict[str, str]]:
    if not isinstance(value, list):
        return []
    if all(isinstance(v, str) for v in value):
        return [{"before": str(a), "after": str(b)} for a, b in pairwise(value)]
    known = ("before", "after", "published", "read_back")
    return [{name: str(v.get(name) or "") for name in known} for v in value if isinstance(v, dict)]
