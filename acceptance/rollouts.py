"""Runs of the rollout topology cells on the pool that serves the training topologies; the parent compares bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from acceptance.once import Once
from acceptance.topologies import Topologies, digests, order, place, shard_hashes
from rlk.acceptance.collector import Evidence
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.evidence.bytes import Token
from rlk.model.weights import load_checkpoint
from rlk.parallel.pool import Outcome, free_port, require

WORKER = Path(__file__).with_name("ws2_rollout_worker.py")
VOCABULARY = 256
WORKLOAD: tuple[tuple[int, SamplingParams], ...] = (
    (1, SamplingParams(1.0, 1.0, -1, 24, 1)),
    (33, SamplingParams(0.7, 0.95, -1, 20, 2)),
    (16, SamplingParams(0.0, 1.0, -1, 16, 3)),
    (129, SamplingParams(1.3, 0.99, 128, 12, 4)),
    (70, SamplingParams(1.0, 1.0, 2, 17, 5)),
    (5, SamplingParams(1.3, 1.0, -1, 24, 6)),
)
"""Prompt tokens and sampling of each request: prompts below, at and above a page, a tile, a split and the tokens of a step; full, nucleus,
greedy and narrow sampling, whose retained ids leave whole vocabulary shards empty."""
LONG = tuple((n, SamplingParams(1.0, 1.0, -1, 120, n)) for n in (20, 40, 60, 80))
"""Enough tokens for a difference in fp32 to pass a rounding to bf16."""


def requests(workload: tuple[tuple[int, SamplingParams], ...] = WORKLOAD) -> list[Request]:
    """The requests of a workload, the same in every run."""
    generator = torch.Generator().manual_seed(13)
    prompt = lambda n: tuple(torch.randint(0, VOCABULARY, (n,), generator=generator).tolist())
    return [Request(i, prompt(n), sampling) for i, (n, sampling) in enumerate(workload)]


@dataclass(frozen=True)
class Generation:
    """What every rank of one rollout topology answered and read back."""

    tp: int
    cp: int
    answers: list[list[Response]]
    readbacks: list[dict[str, Any]]


@dataclass(frozen=True)
class Scored:
    """What every rank of one training topology makes of the answers of a generation."""

    scores: list[list[list[float]]]
    hashes: list[str]
    kernels: list[list[dict[str, Any]]]


class Rollouts:
    """Runs by name, done at most once; one that failed fails every cell that needs it, with the same reason."""

    def __init__(self, topologies: Topologies) -> None:
        self.topologies, self.checkpoint = topologies, topologies.checkpoint
        self._once = Once()

    def reference(self) -> Generation:
        """The start checkpoint at TP = CP = 1."""
        return self.generate("reference", 1, 1)

    def generate(self, name: str, tp: int, cp: int, weights: Path | None = None) -> Generation:
        """The workload at one topology, under the start checkpoint unless told otherwise."""

        def make() -> Generation:
            ranks = require(self.outcomes(tp, cp, weights=weights))
            answers = [[Response.from_plain(row) for row in rank["answers"]] for rank in ranks]
            return Generation(tp, cp, answers, [rank["readback"] for rank in ranks])

        return self._once(f"generate {name}", make)

    def score(self, name: str, tp: int, cp: int, generation: Generation, weights: Path | None = None) -> Scored:
        """Training ranks score what rank 0 of a generation answered."""

        def make() -> Scored:
            answers = [asdict(answer) for answer in generation.answers[0]]
            job = {"answers": answers, "weights": str(weights or self.checkpoint)}
            ranks = require(self._run(tp, cp, "score", requests(), job))
            return Scored([r["scores"] for r in ranks], [r["model_hash"] for r in ranks], [r["kernels"] for r in ranks])

        return self._once(f"score {name}", make)

    def outcomes(
        self, tp: int, cp: int, held: list[Request] | None = None, weights: Path | None = None, fault: str | None = None
    ) -> list[Outcome]:
        """One generation, errors included."""
        return self._run(tp, cp, "generate", held or requests(), {"checkpoint": str(weights or self.checkpoint), "fault": fault})

    def _run(self, tp: int, cp: int, function: str, held: list[Request], job: dict[str, Any]) -> list[Outcome]:
        port = free_port() if tp * cp > 1 else 0
        common = {**place(self.topologies.job, tp * cp), "tp": tp, "cp": cp, "port": port, "checkpoint": str(self.checkpoint)}
        common["requests"] = [asdict(request) for request in held]
        return self.topologies.pool.run(tp * cp, WORKER, function, {**common, **job}, timeout=300)


def compare_answers(evidence: Evidence, run: Generation, reference: Generation, scored: Scored) -> None:
    """Ids and retained ids against another process at TP = CP = 1, logprobs against the trainer; then every rank's answers."""
    expected = reference.answers[0]
    evidence.compare("token ids", _ids(run.answers[0]), _ids(expected))
    evidence.compare("retained ids", _supports(run.answers[0]), _supports(expected))
    evidence.compare_tokens("logprob", _tokens(run.answers[0]), _logprobs(run.answers[0]), _tokens(expected), flat(scored.scores[0]))
    for rank, answers in enumerate(run.answers):
        evidence.compare(f"rank {rank}", _logprobs(answers), flat(scored.scores[0]))


def compare_pair(evidence: Evidence, run: Generation, scored: Scored, published: str) -> None:
    """Logprobs of a rollout topology against a training topology, and what every rank of both sides holds."""
    tokens, expected = _tokens(run.answers[0]), flat(scored.scores[0])
    evidence.compare_tokens("logprob", tokens, _logprobs(run.answers[0]), tokens, expected)
    served = [found["model_hash"] for found in run.readbacks]
    evidence.compare("model", digests([*served, *scored.hashes]), digests([published] * (len(served) + len(scored.hashes))))
    for rank, answers in enumerate(run.answers):
        evidence.compare(f"rollout rank {rank}", _logprobs(answers), expected)
    for rank, scores in enumerate(scored.scores):
        evidence.compare(f"train rank {rank}", flat(scores), expected)


def compare_weights(evidence: Evidence, run: Generation, checkpoint: Path) -> None:
    """The model's hash on every rank, and the hash of each rank's own shards against those cut from the files."""
    whole, own = load_checkpoint(checkpoint).model_hash, shard_hashes(checkpoint, run.tp)
    evidence.compare("model", digests(f["model_hash"] for f in run.readbacks), digests([whole] * len(run.readbacks)))
    for rank, found in enumerate(run.readbacks):
        evidence.compare(f"rank {rank}", digests([found["shard_hash"]]), digests([own[rank % run.tp]]))


def hand_in(evidence: Evidence, run: Generation, scored: Scored, topology: dict[str, Any]) -> None:
    """What ran where: kernels of all ranks, places, layout of the cache, rows, traffic of the generation and orders of reduction."""
    for side, ranks in (("rollout", [found["kernels"] for found in run.readbacks]), ("train", scored.kernels)):
        used: dict[tuple[str, str, str], int] = {}
        for ran in (ran for rank in ranks for ran in rank):
            key = (ran["op"], ran["backend"], ran["kernel_id"])
            used[key] = used.get(key, 0) + ran["calls"]
        evidence.kernels(side, [{"op": op, "backend": backend, "kernel_id": name, "calls": n} for (op, backend, name), n in used.items()])
    places = ("label", "shards", "tp_ranks", "cp_ranks", "kv_heads", "kv_pages", "kv_positions_of_6")
    traffic = [found["traffic"] for found in run.readbacks]
    facts = {
        "topology": topology,
        "ranks": [{name: found[name] for name in places} for found in run.readbacks],
        "partition": [found["counters"] for found in run.readbacks],
        "communication": [found["communication"] for found in run.readbacks],
        "reduction_order": {axis: order(count) for axis, count in (("tp", run.tp), ("cp", 1))},
        "traffic_per_update": [
            {"calls": sum(row["calls"] for row in rank), "bytes_sent": sum(row["bytes_sent"] for row in rank), "rows": rank}
            for rank in traffic
        ],
        "tokens_compared": len(_tokens(run.answers[0])),
        "model_hashes": sorted({found["model_hash"] for found in run.readbacks}),
        "empty_shards": _empty_shards(run.answers[0], run.readbacks[0]["numerics"]),
    }
    for name, value in facts.items():
        evidence.fact(name, value)


def _empty_shards(answers: list[Response], numerics: dict[str, int]) -> int:
    """Vocabulary shards without a retained id, over all tokens that were truncated."""
    width = numerics["padded_vocab"] // numerics["canonical_tp"]
    return sum(numerics["canonical_tp"] - len({i // width for i in kept}) for answer in answers for kept in answer.support or ())


def flat(scores: list[list[float]]) -> torch.Tensor:
    """fp32 values of all samples, one after another."""
    return torch.tensor([value for sample in scores for value in sample], dtype=torch.float32)


def _tokens(answers: list[Response]) -> list[Token]:
    return [(answer.sample_id, at) for answer in answers for at in range(len(answer.token_ids))]


def _ids(answers: list[Response]) -> torch.Tensor:
    return torch.tensor([token for answer in answers for token in answer.token_ids])


def _logprobs(answers: list[Response]) -> torch.Tensor:
    return flat([list(answer.logprobs) for answer in answers])


def _supports(answers: list[Response]) -> torch.Tensor:
    """Every set of retained ids, each after its size."""
    return torch.tensor([i for answer in answers for kept in answer.support or () for i in (len(kept), *kept)])
