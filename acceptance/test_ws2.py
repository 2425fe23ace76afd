"""Any training topology: logprob, loss, gradients, norm and parameters of three updates, byte for byte, and the faults that must show."""

from __future__ import annotations

from typing import Any

import pytest

from acceptance.topologies import (
    Topologies,
    compare_checkpoints,
    compare_figures,
    compare_gradients,
    compare_logprobs,
    compare_parameters,
    hand_in,
)
from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence
from rlk.acceptance.ws2 import STATE, topology
from rlk.model.weights import load_checkpoint


def _judge(cell: Cell, evidence: Evidence, topologies: Topologies) -> None:
    tp, cp, transport = topology(cell.subject)
    run, reference = topologies.run(tp, cp, transport), topologies.reference()
    layout = cell.workload.rpartition("-")[2]
    hand_in(evidence, run, layout, load_checkpoint(topologies.checkpoint).config)
    carried = [answer["communication"]["transport"] for answer in run.ranks(layout)]
    assert not transport or carried == [transport] * (tp * cp), f"the bytes of {cell.subject} were carried by {carried}"
    if cell.judgment == "logprob":
        compare_logprobs(evidence, run, reference, layout)
    elif cell.judgment == "gradients":
        compare_gradients(evidence, run, reference, layout)
    elif cell.judgment == "parameters":
        compare_parameters(evidence, run, reference, layout, STATE)
    elif cell.judgment == "checkpoint":
        compare_checkpoints(evidence, run, reference)
    else:
        compare_figures(evidence, run, reference, layout, cell.judgment)
    traffic = [update["engine_collectives"] for answer in run.ranks(layout) for update in answer["updates"]]
    assert not any(traffic), f"the engine itself ran {max(traffic)} collectives within an update"


@pytest.mark.cells(scope="ws2", judgment="logprob")
def test_logprob(cell: Cell, evidence: Evidence, topologies: Topologies) -> None:
    _judge(cell, evidence, topologies)


@pytest.mark.cells(scope="ws2", judgment="loss")
def test_loss(cell: Cell, evidence: Evidence, topologies: Topologies) -> None:
    _judge(cell, evidence, topologies)


@pytest.mark.cells(scope="ws2", judgment="gradients")
def test_gradients(cell: Cell, evidence: Evidence, topologies: Topologies) -> None:
    _judge(cell, evidence, topologies)


@pytest.mark.cells(scope="ws2", judgment="norm")
def test_norm(cell: Cell, evidence: Evidence, topologies: Topologies) -> None:
    _judge(cell, evidence, topologies)


@pytest.mark.cells(scope="ws2", judgment="parameters")
def test_parameters(cell: Cell, evidence: Evidence, topologies: Topologies) -> None:
    _judge(cell, evidence, topologies)


@pytest.mark.cells(scope="ws2", judgment="checkpoint")
def test_checkpoint(cell: Cell, evidence: Evidence, topologies: Topologies) -> None:
    _judge(cell, evidence, topologies)


@pytest.mark.cells(scope="ws2", subject="ring_order")
def test_ring_order(cell: Cell, evidence: Evidence, topologies: Topologies) -> None:
    """One accumulator per rank and rank after rank, on both sides: the topology shows in what it sums."""
    runs = {}
    for pair in ((1, 1), (2, 1), (1, 2), (2, 4)):
        outcomes = topologies.outcomes(*pair, "ring-{}-{}".format(*pair), fault="ring_order", layouts=["long"], updates=2)
        assert not any(outcome.error for outcome in outcomes), outcomes
        runs[pair] = outcomes[0].value["long"]
    plain, seen, detail = runs.pop((1, 1)), [], []
    for (tp, cp), run in runs.items():
        first, second = ([(a, b) for x, y in zip(*pair) for a, b in zip(x, y)] for pair in zip(_scores(run), _scores(plain)))
        differ = [sum(a != b for a, b in held) for held in (first, second)]
        norms = sum(a["norm"] != b["norm"] for a, b in zip(run["updates"], plain["updates"]))
        # Context parallelism sums gradients only, and Adam's first steps hardly read more than their signs.
        seen.append((tp == 1 or bool(differ[0] and differ[1])) and norms == 2)
        detail.append(f"TP {tp} CP {cp}: {differ[0]} and after an update {differ[1]} of {len(first)} logprobs, {norms} of 2 gradient norms")
    evidence.control("ring_order", all(seen), "; ".join(detail))


def _scores(run: dict[str, Any]) -> list[list[list[float]]]:
    return [update["scores"] for update in run["updates"]]


@pytest.mark.cells(scope="ws2", subject="killed_rank")
def test_killed_rank(cell: Cell, evidence: Evidence, topologies: Topologies) -> None:
    outcomes = topologies.outcomes(2, 2, "killed", fault="killed_rank")
    survivors = [outcome.error.splitlines()[0] for rank, outcome in enumerate(outcomes) if rank != 1]
    named = all("PeerLostError" in said and "rank 1 (tp 1, cp 0) is gone" in said for said in survivors)
    evidence.control("killed_rank", named and "exit code -9" in outcomes[1].error, "; ".join(survivors))


@pytest.mark.cells(scope="ws2", subject="other_contract_version")
def test_other_contract_version(cell: Cell, evidence: Evidence, topologies: Topologies) -> None:
    outcomes = topologies.outcomes(2, 2, "version", fault="other_contract_version")
    _every_rank_refuses(evidence, "other_contract_version", [outcome.error for outcome in outcomes], '"contract_version": 2')


@pytest.mark.cells(scope="ws2", subject="unequal_tokens")
def test_unequal_tokens(cell: Cell, evidence: Evidence, topologies: Topologies) -> None:
    outcomes = topologies.outcomes(2, 2, "tokens", fault="unequal_tokens")
    _every_rank_refuses(evidence, "unequal_tokens", [outcome.error for outcome in outcomes], "tokens, ")


def _every_rank_refuses(evidence: Evidence, name: str, errors: list[str], words: str) -> None:
    said = [error.splitlines()[0] if error else "no error" for error in errors]
    evidence.control(name, all("MismatchError: ranks differ" in line and words in line for line in said), said[0])
