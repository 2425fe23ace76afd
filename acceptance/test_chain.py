"""Chain: every intermediate of the model, trainer against rollout and prefill against decode."""

from __future__ import annotations

import pytest

from acceptance.engines import CHAIN_PROMPTS, Runs, hand_in_engines
from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence


@pytest.mark.cells(scope="chain")
def test_intermediate(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    chain = runs.chain()
    hand_in_engines(evidence, chain.engines)
    evidence.fact("model_hashes", [chain.model_hash])
    evidence.fact("prompt_lengths", list(CHAIN_PROMPTS))
    evidence.fact("response_lengths", [len(r.token_ids) for r in chain.responses])
    for name, sides in chain.pairs(cell).items():
        evidence.compare_tokens(name, *sides)
