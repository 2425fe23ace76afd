"""Chain: every intermediate of the model, trainer against rollout and prefill against decode; on a card also in other layouts."""

from __future__ import annotations

from pathlib import Path

import pytest

from acceptance.chain import Chain
from acceptance.engines import Runs, hand_in_engines
from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence
from rlk.acceptance.matrix import CHAIN_WORKLOAD, SNAPSHOT_WORKLOAD, WORKLOAD


def hand_in(cell: Cell, evidence: Evidence, chain: Chain) -> None:
    """Engines, facts and the comparisons of one cell."""
    hand_in_engines(evidence, chain.engines)
    evidence.fact("model_hashes", [chain.model_hash])
    evidence.fact("layers", chain.layers)
    evidence.fact("prompt_lengths", [len(r.prompt_ids) for r in chain.responses])
    evidence.fact("response_lengths", [len(r.token_ids) for r in chain.responses])
    if cell.subject == "train_layouts":
        for comparison in chain.train_layouts[cell.judgment]:
            evidence.comparison(comparison)
        return
    for name, sides in chain.pairs(cell):
        evidence.compare_tokens(name, *sides)


@pytest.mark.cells(scope="chain", workload=WORKLOAD["cpu"])
def test_tiny(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    hand_in(cell, evidence, runs.chain(cell))


@pytest.mark.cells(scope="chain", workload=WORKLOAD["cuda"])
def test_full_width(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    hand_in(cell, evidence, runs.chain(cell))


@pytest.mark.cells(scope="chain", workload=CHAIN_WORKLOAD["cuda"])
def test_full_depth(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    hand_in(cell, evidence, runs.chain(cell))


@pytest.mark.cells(scope="chain", workload=SNAPSHOT_WORKLOAD)
def test_published_weights(cell: Cell, evidence: Evidence, snapshot: Path, runs: Runs) -> None:
    hand_in(cell, evidence, runs.chain(cell))
