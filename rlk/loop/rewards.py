"""Which reward a response earns: that of the bundled arithmetic, or one that random weights can earn."""

from __future__ import annotations

from collections.abc import Sequence

from rlk.loop.arithmetic import Problem, reward


def reward_of(kind: str, problem: Problem, token_ids: Sequence[int], text: str) -> float:
    """Reward in [0, 1] of one response under a start checkpoint of ``kind`` (its label).

    Random weights never solve a problem: every response would earn 0, no group would teach anything and no weight would move. Under
    synthetic weights the reward is the share of response tokens with an even id, which differs from sample to sample.
    """
    if kind != "synthetic":
        return reward(problem, text)
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids) if token_ids else 0.0
