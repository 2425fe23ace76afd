"""Integration: real vLLM generates, real Megatron-core re-scores, learns and publishes; every token and every publication is judged."""

from __future__ import annotations

import pytest

from acceptance.engines import Runs, compare_logprobs, hand_in_run, hash_bytes
from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence


@pytest.mark.cells(scope="integration", judgment="logprob")
def test_logprob(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    summary = runs.sampling(cell.workload.partition("-")[2])
    hand_in_run(evidence, summary)
    compare_logprobs(evidence, summary)


@pytest.mark.cells(scope="integration", judgment="publication")
def test_publication(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    summary = runs.sampling(cell.workload.partition("-")[2])
    hand_in_run(evidence, summary)
    for step in summary.steps:
        evidence.compare(f"update {step.step}: publication", hash_bytes(step.rollout[1]), hash_bytes(step.train[1]))
        assert step.rollout[0] == step.train[0] == step.published_version
    assert len(set(summary.model_hashes)) == len(summary.steps) + 1, "a publication left the model hash as it was"
