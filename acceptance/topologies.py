"""Runs of the topology cells: a pool of workers serves every topology, each run is made once, the parent compares bytes."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from acceptance.engines import tiny_checkpoint
from acceptance.once import Once
from rlk.acceptance.collector import Evidence
from rlk.acceptance.platforms import Platform
from rlk.acceptance.ws2 import LAYOUTS, MODEL, SIDE, UPDATES, subject
from rlk.contract.models import ModelShape
from rlk.contract.numerics import DEFAULT
from rlk.contract.orders import fold_pairs
from rlk.contract.topology import Topology
from rlk.evidence.bytes import Token
from rlk.loop.labels import shape_config
from rlk.loop.synthetic import synthetic_tensor
from rlk.model.config import Qwen3Config
from rlk.model.layout import hf_shapes, pack_weights
from rlk.model.shards import dimension
from rlk.model.weights import load_checkpoint, model_hash, save_checkpoint, tensor_hash
from rlk.parallel.pool import Outcome, Pool, free_port, require

WORKER = Path(__file__).with_name("ws2_worker.py")
ENGINES = ("rlk.train.trainer", "rlk.rollout.paged.engine")
REFERENCE = (1, 1)
JOB: dict[Platform, dict[str, Any]] = {
    "cpu": {"device": "cpu", "transport": "gloo", "timeout": 60.0, "lr": 1e-3},
    "cuda": {"device": "cuda", "transport": "shm", "timeout": 120.0, "lr": 1e-5},
    "rocm": {"device": "cuda", "transport": "shm", "timeout": 120.0, "lr": 1e-5},
}
"""Of ranks that share a device, see :func:`place`. The first run of a topology compiles kernels, on some ranks sooner than on others. lr:
at 1e-3 one update moves the logprobs of the wide model by hundreds, and the exponential in the KL estimate overflows."""


def place(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    """``job`` for a run of so many ranks: each on a card of its own over NCCL where the machine has that many, else all on the first."""
    return {**job, "transport": "nccl"} if job["device"] == "cuda" and 1 < ranks <= torch.cuda.device_count() else job


def synthetic_checkpoint(path: Path, shape: ModelShape) -> Path:
    """Random weights of a shape."""
    config = shape_config(shape)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    save_checkpoint(path, config, {name: synthetic_tensor(name, size, config, 0, device) for name, size in hf_shapes(config).items()})
    return path


@dataclass(frozen=True)
class Run:
    """One topology's answers by rank and layout, and the directory of its tensors. written_by: whose state it went on from."""

    tp: int
    cp: int
    answers: list[dict[str, Any]]
    directory: Path
    written_by: str

    def ranks(self, layout: str) -> list[dict[str, Any]]:
        """What every rank reports of a layout."""
        return [answer[layout] for answer in self.answers]

    def whole(self, layout: str, number: int) -> dict[str, torch.Tensor]:
        """Whole tensors after update ``number`` by kind and packed name, or on a card the fingerprints of their shards."""
        return load_file(self.directory / f"{layout}-{number}.safetensors")


class Topologies:
    """Runs by topology, done at most once; a run that failed fails every cell that needs it, with the same reason.

    job: what every rank is told: its device, the transport, for how many seconds it waits for the others, and the learning rate.
    """

    def __init__(self, checkpoint: Path, scratch: Path, platform: Platform, size: int = 8) -> None:
        self.checkpoint, self.scratch, self.job, self.layouts = checkpoint, scratch, JOB[platform], LAYOUTS[platform]
        self.pool = Pool(size, ENGINES if platform == "cpu" else ())
        if platform != "cpu":
            require(self.pool.run(size, WORKER, "ready"))
        self._once = Once()

    def reference(self) -> Run:
        """The run at TP = CP = 1 that all others are compared with."""
        return self._once("reference", lambda: self._make("reference", *REFERENCE, exchange=None))

    def run(self, tp: int, cp: int, transport: str = "") -> Run:
        """All layouts at one topology; it goes on from the state that the topology before it in the pool wrote. With a transport the
        packed layout alone, on ranks that have a card each."""
        reference = self.reference()
        name = subject(tp, cp, transport)
        asked = {"transport": transport, "layouts": ["packed"]} if transport else {}
        return self._once(name, lambda: self._make(name, tp, cp, exchange=(self._once.results() or [reference])[-1], **asked))

    def outcomes(self, tp: int, cp: int, name: str, **job: Any) -> list[Outcome]:
        """One update of the packed layout with further settings of the job, errors included."""
        directory = self.scratch / name
        directory.mkdir()
        return self._outcomes(tp, cp, directory, {"layouts": ["packed"], "updates": 1, **job})

    def _make(self, name: str, tp: int, cp: int, exchange: Run | None, **asked: Any) -> Run:
        directory = self.scratch / name
        directory.mkdir()
        state = (exchange.directory if exchange else directory) / "state"
        job = {"layouts": self.layouts, "updates": UPDATES, "exchange": str(state), **asked}
        answers = require(self._outcomes(tp, cp, directory, job))
        if exchange:
            shutil.rmtree(state)  # gigabytes on a card, which nobody reads again
        return Run(tp, cp, answers, directory, exchange.directory.name if exchange else name)

    def _outcomes(self, tp: int, cp: int, directory: Path, job: dict[str, Any]) -> list[Outcome]:
        common = {**place(self.job, tp * cp), "tp": tp, "cp": cp, "checkpoint": str(self.checkpoint), "out": str(directory)}
        port = free_port() if tp * cp > 1 else 0
        return self.pool.run(tp * cp, WORKER, "update", {**common, "port": port, **job}, timeout=300)


def compare_logprobs(evidence: Evidence, run: Run, reference: Run, layout: str) -> None:
    """Scores before each update and after the last, token by token, and every rank's answer against rank 0 of the reference."""
    expected = _scores(reference, layout, 0)
    tokens: list[Token] = [(i, at) for i, sample in enumerate(expected[0]) for at in range(len(sample))]
    names = [*(f"before update {i}" for i in range(1, UPDATES + 1)), "after all updates"]
    for name, actual, wanted in zip(names, _scores(run, layout, 0), expected):
        evidence.compare_tokens(name, tokens, _flat(actual), tokens, _flat(wanted))
    for rank in range(len(run.answers)):
        evidence.compare(f"rank {rank}", _joined(_scores(run, layout, rank)), _joined(expected))


def compare_figures(evidence: Evidence, run: Run, reference: Run, layout: str, figure: str) -> None:
    """fp64 figures of every update ("loss" or "norm"), on every rank."""
    take = lambda answer: torch.tensor([update[figure] for update in answer["updates"]], dtype=torch.float64)
    for rank, answer in enumerate(run.ranks(layout)):
        evidence.compare(f"rank {rank}", take(answer), take(reference.ranks(layout)[0]))


def compare_gradients(evidence: Evidence, run: Run, reference: Run, layout: str) -> None:
    """The gradient of every parameter in every update, and that every rank held its part of it."""
    for number in range(1, UPDATES + 1):
        actual, expected = run.whole(layout, number), reference.whole(layout, number)
        for name in _of_kind(expected, "gradient"):
            evidence.compare(f"update {number}: {name.removeprefix('gradient.')}", actual[name], expected[name])
    _compare_parts(evidence, run, reference, layout, ("gradient",))


def compare_parameters(evidence: Evidence, run: Run, reference: Run, layout: str, kinds: tuple[str, ...]) -> None:
    """Parameters, master weights and moments after every update, and that every rank held its part of them."""
    for number in range(1, UPDATES + 1):
        actual, expected = run.whole(layout, number), reference.whole(layout, number)
        for kind in kinds:
            names = _of_kind(expected, kind)
            joined = [torch.cat([tensors[name].flatten() for name in names]) for tensors in (actual, expected)]
            evidence.compare(f"update {number}: {kind}", *joined)
    _compare_parts(evidence, run, reference, layout, kinds)


def compare_checkpoints(evidence: Evidence, run: Run, reference: Run) -> None:
    """The state and weights that were written, and what became of a state that another topology wrote."""
    held = [answer["checkpoint"] for answer in run.ranks("packed")]
    expected = reference.ranks("packed")[0]["checkpoint"]
    for name, key in (("state file", "state"), ("published weights", "published"), ("parameters one update later", "model_hash")):
        evidence.compare(name, digests(h[key] for h in held), digests([expected[key]] * len(held)))
    after = reference.ranks("packed")[0]["scores"]
    evidence.compare("logprob after loading", _joined([h["scores"] for h in held]), _joined([after] * len(held)))
    evidence.fact("state_written_by", run.written_by)


def hand_in(evidence: Evidence, run: Run, layout: str, config: Qwen3Config) -> None:
    """What ran where: kernels of all ranks, places, partition, traffic and orders of reduction."""
    ranks = run.ranks(layout)
    used: dict[tuple[str, str, str], int] = {}
    for ran in (ran for answer in ranks for ran in answer["kernels"]):
        key = (ran["op"], ran["backend"], ran["kernel_id"])
        used[key] = used.get(key, 0) + ran["calls"]
    evidence.kernels(SIDE, [{"op": op, "backend": backend, "kernel_id": name, "calls": n} for (op, backend, name), n in used.items()])
    traffic = [answer["updates"][-1]["traffic"] for answer in ranks]
    topology = Topology(tp=run.tp, cp=run.cp)
    rows = max(part["rows"] for answer in ranks for part in answer["partition"])
    facts = {
        "topology": {"tp": run.tp, "cp": run.cp},
        "ranks": [answer["parallel"] for answer in ranks],
        "partition": [answer["partition"] for answer in ranks],
        "communication": [answer["communication"] for answer in ranks],
        "reduction_order": {axis: order(count) for axis, count in (("tp", run.tp), ("cp", run.cp))},
        "traffic_per_update": [
            {"calls": sum(row["calls"] for row in rank), "bytes_sent": sum(row["bytes_sent"] for row in rank), "rows": rank}
            for rank in traffic
        ],
        "layer_bytes": layer_bytes(config, topology, rows),
        "engine_collectives": max(update["engine_collectives"] for answer in ranks for update in answer["updates"]),
        "gradient_scales": ranks[0]["gradient_scales"],
        "tokens_compared": _joined(_scores(run, layout, 0)).numel(),
        "model_hashes": [update["model_hash"] for update in ranks[0]["updates"]],
    }
    for name, value in facts.items():
        evidence.fact(name, value)


def layer_bytes(config: Qwen3Config, topology: Topology, rows: int) -> dict[str, dict[str, int]]:
    """Bytes that a rank sends for one layer's forward and backward over ``rows`` local rows, ours beside Megatron-core's own.

    Megatron-core: a ring all-reduce of bf16 [rows, H] after o_proj and down_proj and of the input gradients of qkv and gate_up, each
    2·(n-1)/n; context parallel point-to-point: K and V forward, K, V and their gradients backward. Ours: fp32 parts exchanged and bf16
    sums gathered, each (n-1)/n; K and V gathered forward, Q, dO, LSE₂ and Σ dO·O backward. Weight gradients are not counted: both send
    2·(n-1)/n fp32 elements each, Megatron-core once per update, we once per micro-batch.
    """
    n, c = topology.tp, topology.cp
    hidden, width = rows * config.hidden_size, rows * config.head_dim
    queries, keys = config.num_attention_heads // n, config.num_key_value_heads // n
    lse = rows * queries
    return {
        "tp": {"megatron": 4 * 2 * hidden * 2 * (n - 1) // n, "rlk": 4 * hidden * (4 + 2) * (n - 1) // n},
        "cp": {
            "megatron": (c - 1) * 2 * keys * width * 2 * (1 + 2),
            "rlk": (c - 1) * (2 * keys * width * 2 + 2 * queries * width * 2 + 2 * lse * 4),
        },
    }


def order(ranks: int) -> str:
    """How the parts of ``ranks`` ranks are added."""
    return fold_pairs([f"r{rank}" for rank in range(ranks)], lambda a, b: f"({a}+{b})")


def _scores(run: Run, layout: str, rank: int) -> list[list[list[float]]]:
    """Scores before each update and after the last; [state][sample][token]."""
    answer = run.ranks(layout)[rank]
    return [*(update["scores"] for update in answer["updates"]), answer["scores"]]


def _flat(scores: list[list[float]]) -> torch.Tensor:
    return torch.tensor([value for sample in scores for value in sample], dtype=torch.float32)


def _joined(scores: list[list[list[float]]]) -> torch.Tensor:
    return torch.cat([_flat(state) for state in scores])


def _of_kind(tensors: dict[str, torch.Tensor], kind: str) -> list[str]:
    return sorted(name for name in tensors if name.startswith(f"{kind}."))


def _compare_parts(evidence: Evidence, run: Run, reference: Run, layout: str, kinds: tuple[str, ...]) -> None:
    """Digests of what each rank itself held after every update, against the same part of the reference's whole tensors."""
    wholes = [reference.whole(layout, number) for number in range(1, UPDATES + 1)]
    for rank, answer in enumerate(run.ranks(layout)):
        expected = [
            tensor_hash(_part(name, whole[name], run.tp, rank)) for whole in wholes for kind in kinds for name in _of_kind(whole, kind)
        ]
        held = [
            update["digests"][name] for update, whole in zip(answer["updates"], wholes) for kind in kinds for name in _of_kind(whole, kind)
        ]
        evidence.compare(f"rank {rank}", digests(held), digests(expected))


def shard_hashes(checkpoint: Path, tp: int) -> list[str]:
    """What each tensor parallel rank's own packed weights must hash to, cut from the files."""
    source = load_checkpoint(checkpoint)
    packed = pack_weights(source.tensors, source.config, DEFAULT)
    return [model_hash({name: _part(name, whole, tp, rank) for name, whole in packed.items()}) for rank in range(tp)]


def _part(name: str, whole: torch.Tensor, tp: int, rank: int) -> torch.Tensor:
    """Rank ``rank``'s part of a whole packed tensor; ranks count TP first."""
    cut = dimension(name)
    if cut is not None and whole.dtype == torch.uint8:
        cut = 0  # fingerprints of its shards
    return whole if cut is None else whole.chunk(tp, cut)[rank % tp].contiguous()


def digests(hashes: Iterable[str]) -> torch.Tensor:
    """One row per hash, uint8 [hashes, 32]."""
    return torch.tensor([list(hashlib.sha256(h.encode()).digest()) for h in hashes], dtype=torch.uint8)


def scratch_runs(root: Path, scratch: Path, platform: Platform) -> Iterator[Topologies]:
    """Topologies with a pool that ends with the session."""
    checkpoint = tiny_checkpoint(root) if platform == "cpu" else synthetic_checkpoint(scratch / "model", MODEL[platform])
    topologies = Topologies(checkpoint, scratch, platform)
    try:
        yield topologies
    finally:
        topologies.pool.close()
