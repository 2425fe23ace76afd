"""What one trainer rank of the topology cells does, in a worker process of the pool. Figures are JSON, tensors go to safetensors."""

from __future__ import annotations

import gc
import hashlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from acceptance.fingerprints import fingerprints, whole_fingerprints
from rlk.contract import numerics, topology
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.contract.topology import TokenLeaves
from rlk.contract.update import GrpoParams
from rlk.kernels import dispatch
from rlk.model import linear, shards
from rlk.model.weights import tensor_hash
from rlk.parallel import collectives, link
from rlk.parallel.transport import OWN_CARD
from rlk.train import batch, modules, process
from rlk.train.batch import Sample, micro_batches
from rlk.train.trainer import MegatronTrainer

VOCABULARY = 256
LAYOUTS: dict[str, tuple[int, tuple[tuple[int, int], ...]]] = {
    "packed": (3, ((5, 9), (17, 48), (1, 1), (33, 17), (70, 31))),
    "single": (1, ((40, 13), (3, 30), (16, 1))),
    "short": (2, ((1, 1), (2, 1))),
    "long": (4, ((60, 140), (33, 160), (100, 150), (5, 190))),
}
"""Layout -> samples per micro-batch, and (prompt, response) tokens of each sample: groups, tiles, splits and blocks begun and filled.
long: enough of them for a difference in fp32 to pass a rounding to bf16."""


def samples(layout: str) -> list[Sample]:
    """The samples of a layout, the same on every rank: plain, hot, greedy and truncated ones, whose retained ids leave most vocabulary
    shards empty."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda count: tuple(torch.randint(0, VOCABULARY, (count,), generator=generator).tolist())
    made = []
    for i, (prompt, answer) in enumerate(LAYOUTS[layout][1]):
        sampling = SamplingParams(temperature=(0.7, 1.0, 0.0, 1.3, 0.7)[i], top_k=4 if i == 3 else -1)
        ids, tokens = draw(prompt), draw(answer)
        kept = tuple(tuple(sorted({token, *draw(3)})) for token in tokens) if sampling.truncates else None
        made.append(Sample(Request(i, ids, sampling), Response(i, ids, tokens, (0.0,) * answer, kept, "length", 0, 0)))
    return made


def ready(rank: int) -> None:
    """Nothing: the engines are imported by now, in all workers at once."""


def update(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """UPDATES updates of every layout of the job at its topology; see :func:`_train` for what comes back by layout."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    try:
        with _planted(job.get("fault"), rank):
            return {layout: _train(rank, job, layout) for layout in job["layouts"]}
    finally:
        process.stop()
        release(job["device"])


def _trainer(rank: int, job: dict[str, Any], layout: str) -> MegatronTrainer:
    return MegatronTrainer(
        Path(job["checkpoint"]), tp=job["tp"], cp=job["cp"], rank=rank, port=job["port"], timeout=job["timeout"],
        micro_batch_size=LAYOUTS[layout][0], grpo=GrpoParams(kl_coef=0.05), device=device(rank, job), transport=job["transport"],
    )  # fmt: skip


def _train(rank: int, job: dict[str, Any], layout: str) -> dict[str, Any]:
    """Figures of every update, digests of this rank's own tensors after each, its place, traffic and read-back.

    Rank 0 writes the whole tensors of update i to ``out/layout-i.safetensors``; after the last, the trainer's state and weights.
    """
    out = Path(job["out"])
    dispatch.reset_readback()
    trainer = _trainer(rank, job, layout)
    held = samples(layout)
    if job.get("fault") == "unequal_tokens" and rank == trainer.parallel.topology.train_ranks - 1:
        response = held[1].response
        held[1] = Sample(held[1].request, replace(response, token_ids=response.token_ids[:-1], logprobs=response.logprobs[:-1]))
    updates = []
    for number in range(1, job["updates"] + 1):
        counter = _Collectives(trainer.parallel.link)
        before = trainer.score(held)
        reference = trainer.reference_score(held)
        with counter:
            metrics = _step(trainer, held, before, reference, job["lr"])
        found = trainer.readback()
        parts, whole = _tensors(trainer)
        if rank == 0:
            save_file({name: tensor.contiguous() for name, tensor in whole.items()}, out / f"{layout}-{number}.safetensors")
        updates.append(
            {
                "scores": before,
                "loss": [metrics.loss, metrics.kl, metrics.clip_fraction],
                "norm": [metrics.grad_norm, metrics.grad_scale],
                "model_hash": metrics.model_hash_after,
                "traffic": found["traffic"],
                "engine_collectives": counter.calls,
                "digests": {name: tensor_hash(tensor) for name, tensor in parts.items()},
            }
        )
    result = {
        "updates": updates,
        "scores": trainer.score(held),
        "kernels": found["kernels"],
        "parallel": found["parallel"],
        "communication": {"transport": trainer.parallel.link.transport, "device": found["device"]},
        "gradient_scales": found["gradient_scales"],
        "partition": _partition(trainer, held, layout),
    }
    if job.get("exchange") and layout == "packed":
        published = _save(job, trainer)
        del trainer, parts, whole, found
        release(job["device"])
        result["checkpoint"] = {"published": published, **_resume(rank, job)}
    return result


def _step(trainer: MegatronTrainer, held: Sequence[Sample], old: Any, reference: Any, lr: float) -> Any:
    rewards = [(1.0, 0.0, 0.5, 0.25, 0.75)[i] for i in range(len(held))]
    groups = [0] * len(held)
    return trainer.step(held, rewards, groups, old, lr=lr, reference_scores=reference)


def _tensors(trainer: MegatronTrainer) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Gradients, parameters and optimizer state by kind and packed name, of this rank and whole; on a card their fingerprints."""
    found = {f"gradient.{name}": tensor for name, tensor in trainer.optimizer.gradients.items()}
    found |= {f"parameter.{name}": parameter.detach() for name, parameter in trainer.model.parameters.items()}
    found |= trainer.optimizer.state()
    place = trainer.parallel
    if trainer.device.type == "cpu":
        return found, shards.whole(found, place.tp)
    parts = fingerprints(found, len(place.shards))
    return parts, whole_fingerprints(parts, place.tp)


def device(rank: int, job: dict[str, Any]) -> str:
    """Of a rank: over some transports each has a card of its own, else all share the first."""
    return "cpu" if job["device"] == "cpu" else f"cuda:{rank if job['transport'] in OWN_CARD else 0}"


def release(device: str) -> None:
    """Give memory of the card back to the other workers."""
    if device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()


def _partition(trainer: MegatronTrainer, held: Sequence[Sample], layout: str) -> list[dict[str, int]]:
    """Rows of this rank in every micro-batch: all, without padding, and those that it scores."""
    place = trainer.parallel
    batches = micro_batches(held, LAYOUTS[layout][0], trainer.numerics, place.cp.size, place.cp.rank)
    return [
        {"rows": b.tokens, "real_rows": b.tokens if b.context is None else b.context.real.numel(), "scored_rows": b.rows.numel()}
        for b in batches
    ]


def _save(job: dict[str, Any], trainer: MegatronTrainer) -> str:
    """Save the state and publish the weights; the hash of these."""
    out = Path(job["out"])
    trainer.save_state(out / "state")
    return trainer.publish(out / "published", 1).model_hash


def _resume(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Go on from the state that another topology wrote: scores, and one more update; and the hash of the state that this one wrote."""
    trainer = _trainer(rank, job, "packed")
    trainer.load_state(Path(job["exchange"]))
    held = samples("packed")
    scores = trainer.score(held)
    metrics = _step(trainer, held, scores, trainer.reference_score(held), job["lr"])
    state = trainer.parallel.link.lead(lambda: _file_hash(Path(job["out"]) / "state" / "optimizer.safetensors"))
    return {"state": state, "scores": scores, "model_hash": metrics.model_hash_after}


def _file_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class _Collectives(TorchDispatchMode):
    """Counts every collective that reaches torch otherwise than through this project's link."""

    def __init__(self, link: link.Link) -> None:
        super().__init__()
        self.calls, self._link = 0, link

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func.namespace == "c10d" and not self._link.busy:
            self.calls += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def _planted(fault: str | None, rank: int) -> Iterator[None]:
    """Plant a fault into this process for as long as the job runs."""
    if fault == "ring_order":
        with _ring_order():
            yield
    elif fault == "killed_rank" and rank == 1:
        with mock.patch.object(link.Link, "run", _dies_at(link.Link.run, 60)):
            yield
    elif fault == "other_contract_version" and rank == 1:
        with mock.patch.object(numerics, "CONTRACT_VERSION", numerics.CONTRACT_VERSION + 1):
            yield
    else:
        yield


@contextmanager
def _ring_order() -> Iterator[None]:
    """Sums as a plain implementation takes them: one accumulator over all that a rank holds, and rank after rank."""

    def ring(parts: Sequence[torch.Tensor], add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total = add(total, part)
        return total

    def one_leaf(cut: Callable[..., TokenLeaves]) -> Callable[..., TokenLeaves]:
        return lambda *arguments, **keywords: TokenLeaves((index := cut(*arguments, **keywords).index), (0, len(index)))

    with (
        mock.patch.object(collectives, "fold_pairs", ring),
        mock.patch.object(modules, "column", lambda x, w, _, tp: linear.column(x, w, 1, tp)),
        mock.patch.object(modules, "row", lambda x, w, _, tp: linear.row(x, w, 1, tp)),
        mock.patch.object(modules, "output", lambda x, w, _, tp: linear.output(x, w, 1, tp)),
        mock.patch.object(batch, "token_leaves", one_leaf(topology.token_leaves)),
        mock.patch.object(batch, "local_token_leaves", one_leaf(topology.local_token_leaves)),
    ):
        yield


def _dies_at(run: Callable[..., Any], last: int) -> Callable[..., Any]:
    calls = [0]

    def dying(self: link.Link, *arguments: Any) -> Any:
        calls[0] += 1
        if calls[0] == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return run(self, *arguments)

    return dying
