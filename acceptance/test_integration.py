"""Integration: real vLLM generates, real Megatron-core re-scores, learns and publishes; every token and every publication is judged."""

from __future__ import annotations

from dataclasses import replace

import pytest

from acceptance.engines import Runs, compare_logprobs, compare_with_one_rank, hand_in_run, hand_in_timings, hash_bytes
from acceptance.topologies import order, shard_hashes
from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence
from rlk.acceptance.matrix import CROSS_RANKS, CROSS_TRANSPORTS
from rlk.loop.records import RunSummary


@pytest.mark.cells(scope="integration", judgment="logprob")
def test_logprob(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    summary = _hand_in(cell, evidence, runs)
    hand_in_timings(evidence, summary)
    compare_logprobs(evidence, summary)
    if cell.subject in CROSS_TRANSPORTS:
        compare_with_one_rank(evidence, summary, _on_one_rank(cell, runs))


@pytest.mark.cells(scope="integration", judgment="publication")
def test_publication(cell: Cell, evidence: Evidence, runs: Runs) -> None:
    summary = _hand_in(cell, evidence, runs)
    for step in summary.steps:
        evidence.compare(f"update {step.step}: publication", hash_bytes(step.rollout[1]), hash_bytes(step.train[1]))
        assert step.rollout[0] == step.train[0] == step.published_version
    assert len(set(summary.model_hashes)) == len(summary.steps) + 1, "a publication left the model hash as it was"
    if cell.subject in CROSS_TRANSPORTS:
        _compare_shards(cell, evidence, summary, _on_one_rank(cell, runs))


def _compare_shards(cell: Cell, evidence: Evidence, summary: RunSummary, single: RunSummary) -> None:
    """Every publication with that of the run on one rank, and what each rank of the rollout engine holds at the end."""
    for step, alone in zip(summary.steps, single.steps, strict=True):
        evidence.compare(f"update {step.step}: publication of one rank", hash_bytes(step.train[1]), hash_bytes(alone.train[1]))
    last = summary.directory / "weights" / f"v{summary.steps[-1].published_version}"
    held = [rank["shard_hash"] for rank in summary.manifest.engines["rollout"]["ranks"]]
    for rank, (actual, expected) in enumerate(zip(held, shard_hashes(last, CROSS_RANKS[cell.platform].rollout_tp), strict=True)):
        evidence.compare(f"rank {rank}: shards", hash_bytes(actual), hash_bytes(expected))


def _hand_in(cell: Cell, evidence: Evidence, runs: Runs) -> RunSummary:
    summary = runs.integration(cell)
    hand_in_run(evidence, summary)
    if cell.subject in CROSS_TRANSPORTS:
        _hand_in_ranks(cell, evidence, summary)
    return summary


def _hand_in_ranks(cell: Cell, evidence: Evidence, summary: RunSummary) -> None:
    """Topology of both engines, and of each rank, as it reads itself back, its part, its transport and its device."""
    asked, engines = CROSS_RANKS[cell.platform], summary.manifest.engines
    trainers, servers = ({rank["pid"]: rank for rank in engines[side]["ranks"]}.values() for side in ("train", "rollout"))
    assert (len(trainers), len(servers)) == (asked.tp * asked.cp, asked.rollout_tp), "ranks of an engine share a process"
    if cell.platform != "cpu":
        carriers = {rank["transport"] for rank in (*servers, *(rank["parallel"] for rank in trainers))}
        assert carriers == {CROSS_TRANSPORTS[cell.subject] or "peer"}, "an engine has another transport"
    evidence.fact("topology", {"train": {"tp": asked.tp, "cp": asked.cp}, "rollout": {"tp": asked.rollout_tp}})
    held = [{"rank": rank["rank"], "shards": rank["shards"]} for rank in servers]
    evidence.fact("ranks", {"train": [rank["parallel"] for rank in trainers], "rollout": held})
    carried = {"train": [(rank["parallel"]["transport"], rank["device"]) for rank in trainers]}
    carried["rollout"] = [(rank["transport"], rank["device"]) for rank in servers]
    evidence.fact("communication", {side: [f"{how}, {where}" for how, where in ranks] for side, ranks in carried.items()})
    evidence.fact("reduction_order", {"tp": order(asked.tp), "cp": order(asked.cp), "rollout tp": order(asked.rollout_tp)})


def _on_one_rank(cell: Cell, runs: Runs) -> RunSummary:
    return runs.integration(replace(cell, subject="RR"))
