"""What one rank of the rollout topology cells does, in a worker process of the pool: generate with the paged engine, or score. All JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from acceptance.ws2_worker import device, release
from rlk.contract.records import Request, Response
from rlk.contract.topology import Topology
from rlk.kernels import dispatch
from rlk.model import linear, qwen3
from rlk.parallel import collectives
from rlk.parallel.rendezvous import leave
from rlk.parallel.state import enter
from rlk.rollout.paged import cache
from rlk.rollout.paged.engine import PagedEngine


def generate(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Responses of one call and the engine's read-back."""
    _begin()
    place = torch.device(device(rank, job))
    if place.type == "cuda":
        torch.cuda.set_device(place)
    parallel = enter(rank, Topology(tp=job["tp"], cp=job["cp"]), job["port"], job["timeout"], job["transport"])
    try:
        with _planted(job.get("fault")):
            engine = PagedEngine(Path(job["checkpoint"]), parallel, device=place, stop_token_ids=())
            answers = engine.generate([Request.from_plain(row) for row in job["requests"]])
            communication = {"transport": parallel.link.transport, "device": str(place)}
            return {"answers": [asdict(answer) for answer in answers], "readback": {**engine.readback(), "communication": communication}}
    finally:
        leave(parallel.link)
        engine = None
        release(job["device"])


def score(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """The trainer's logprobs of responses under the weights of ``job["weights"]``, and its read-back."""
    from rlk.train import process
    from rlk.train.batch import pair
    from rlk.train.trainer import MegatronTrainer

    _begin()
    held = pair([Request.from_plain(row) for row in job["requests"]], [Response.from_plain(row) for row in job["answers"]])
    try:
        trainer = MegatronTrainer(
            Path(job["checkpoint"]), tp=job["tp"], cp=job["cp"], rank=rank, port=job["port"], timeout=job["timeout"], micro_batch_size=3,
            device=device(rank, job), transport=job["transport"],
        )  # fmt: skip
        loaded = trainer.load(Path(job["weights"]), 1)
        scores = trainer.score(held)
        return {"scores": scores, "model_hash": loaded, "kernels": trainer.readback()["kernels"]}
    finally:
        process.stop()
        trainer = None
        release(job["device"])


def _begin() -> None:
    torch.set_num_threads(1)
    dispatch.reset_readback()


@contextmanager
def _planted(fault: str | None) -> Iterator[None]:
    """Plant a fault into this process for as long as the job runs."""
    if fault == "rollout_ring_order":
        with (
            mock.patch.object(collectives, "fold_pairs", _ring),
            mock.patch.object(qwen3, "row", lambda x, w, shards, tp: linear.row(x, w, 1, tp)),
        ):
            yield
    elif fault == "rollout_rank_order":
        with mock.patch.object(cache, "in_logical_order", lambda held: held.permute(1, 2, 0, 3, 4).flatten(2, 3)):
            yield
    else:
        yield


def _ring(parts: Sequence[torch.Tensor], add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """One accumulator, rank after rank."""
    total = parts[0]
    for part in parts[1:]:
        total = add(total, part)
    return total
