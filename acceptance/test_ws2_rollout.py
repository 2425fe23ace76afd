"""Any rollout topology against any training topology: token ids, retained ids and logprobs byte for byte, and faults that must show."""

from __future__ import annotations

import pytest

from acceptance.rollouts import LONG, Generation, Rollouts, Scored, compare_answers, compare_pair, compare_weights, hand_in, requests
from acceptance.topologies import Topologies
from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence
from rlk.acceptance.ws2_rollout import pair_of, rollout_of
from rlk.contract.records import Response


@pytest.fixture(scope="session")
def rollouts(topologies: Topologies) -> Rollouts:
    """Generations on the pool of the training topologies."""
    return Rollouts(topologies)


@pytest.mark.cells(scope="ws2", judgment="rollout_logprob")
def test_topology(cell: Cell, evidence: Evidence, rollouts: Rollouts) -> None:
    run, scored = _run(cell, evidence, rollouts)
    compare_answers(evidence, run, rollouts.reference(), scored)


@pytest.mark.cells(scope="ws2", judgment="rollout_weights")
def test_weights(cell: Cell, evidence: Evidence, rollouts: Rollouts) -> None:
    run, _ = _run(cell, evidence, rollouts)
    compare_weights(evidence, run, rollouts.checkpoint)


def _run(cell: Cell, evidence: Evidence, rollouts: Rollouts) -> tuple[Generation, Scored]:
    """One rollout topology, and training at TP = CP = 1 on the answers of the reference."""
    tp, cp = rollout_of(cell.subject)
    run, scored = rollouts.generate(cell.subject, tp, cp), rollouts.score("reference", 1, 1, rollouts.reference())
    hand_in(evidence, run, scored, {"rollout_tp": tp, "rollout_cp": cp, "tp": 1, "cp": 1})
    return run, scored


@pytest.mark.cells(scope="ws2", judgment="pair_logprob")
def test_pair(cell: Cell, evidence: Evidence, rollouts: Rollouts, topologies: Topologies) -> None:
    """Weights that the training topology published after its updates, served at the rollout topology, scored where they were trained."""
    train, rollout = pair_of(cell.subject)
    trained = topologies.run(*train)
    published, weights = trained.ranks("packed")[0]["checkpoint"]["published"], trained.directory / "published"
    run = rollouts.generate(cell.subject, *rollout, weights=weights)
    scored = rollouts.score(cell.subject, *train, run, weights=weights)
    hand_in(evidence, run, scored, {"rollout_tp": rollout[0], "rollout_cp": rollout[1], "tp": train[0], "cp": train[1]})
    compare_pair(evidence, run, scored, published)


@pytest.mark.cells(scope="ws2", subject="rollout_ring_order")
def test_ring_order(cell: Cell, evidence: Evidence, rollouts: Rollouts) -> None:
    """One accumulator per rank and rank after rank, on both sides: the topology shows in the logprobs."""
    answers = {}
    for tp in (1, 2, 4):
        outcomes = rollouts.outcomes(tp, 1, requests(LONG), fault=cell.subject)
        assert not any(outcome.error for outcome in outcomes), outcomes
        answers[tp] = [Response.from_plain(row) for row in outcomes[0].value["answers"]]
    plain = answers.pop(1)
    total = sum(len(answer.logprobs) for answer in plain)
    differ = {
        tp: sum(a != b for x, y in zip(found, plain) for a, b in zip(x.logprobs, y.logprobs, strict=True)) for tp, found in answers.items()
    }
    detail = "; ".join(f"TP {tp}: {count} of {total} logprobs" for tp, count in differ.items())
    evidence.control(cell.subject, all(differ.values()), detail)


@pytest.mark.cells(scope="ws2", subject="rollout_rank_order")
def test_rank_order(cell: Cell, evidence: Evidence, rollouts: Rollouts) -> None:
    """Rank 0 holds positions 0, 2, 4 and rank 1 positions 1, 3, 5: read one after another they are another sequence."""
    said = [outcome.error.partition("\n")[0] for outcome in rollouts.outcomes(1, 2, fault=cell.subject)]
    evidence.control(cell.subject, all("not finite" in line for line in said), "; ".join(said))
