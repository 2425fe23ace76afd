"""What the worker processes of tests/test_paged_*.py do; results are JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.contract.topology import Topology
from rlk.kernels import dispatch
from rlk.parallel.rendezvous import leave
from rlk.parallel.state import enter
from rlk.rollout.paged import cache
from rlk.rollout.paged.engine import PagedEngine


@contextmanager
def engine(rank: int, job: dict[str, Any]) -> Iterator[PagedEngine]:
    torch.set_num_threads(1)
    dispatch.reset_readback()
    parallel = enter(rank, Topology(tp=job["tp"], cp=job["cp"]), job["port"], 60)
    try:
        yield PagedEngine(Path(job["checkpoint"]), parallel, **job.get("options", {}))
    finally:
        leave(parallel.link)


def generate(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Responses to several calls of one engine, and its read-back."""
    with engine(rank, job) as paged, ExitStack() as planted:
        if job.get("fault") == "rank_order":  # as if the pages of the ranks followed each other
            planted.enter_context(mock.patch.object(cache, "in_logical_order", lambda held: held.permute(1, 2, 0, 3, 4).flatten(2, 3)))
        answers = [[asdict(response) for response in paged.generate([Request.from_plain(row) for row in call])] for call in job["calls"]]
        return {"answers": answers, "readback": paged.readback()}


def faults(rank: int, job: dict[str, Any]) -> dict[str, str]:
    """What every rank says to calls that cannot be done; the engine still works afterwards."""
    with engine(rank, job) as paged:
        held = [Request.from_plain(row) for row in job["calls"][0]]
        seed = asdict(held[0].sampling) | {"seed": 1 + rank}
        said = {
            "requests": _error(lambda: paged.generate([Request(0, held[0].prompt_ids, SamplingParams(**seed)), *held[1:]])),
            "twice": _error(lambda: paged.generate([held[0], held[0]])),
            "version": _error(lambda: paged.load_weights(Path(job["second"]), 0)),
            "announced": _error(lambda: paged.load_weights(Path(job["second"]), 3, announced="00")),
            "config": _error(lambda: paged.load_weights(Path(job["other"]), 3)),
        }
        before = paged.generate(held)
        loaded = paged.load_weights(Path(job["second"]), 3)
        after = paged.generate(held)
        paged.load_weights(Path(job["broken"]), 4)
        said["not finite"] = _error(lambda: paged.generate(held))
        return {**said, "loaded": loaded, "before": _plain(before), "after": _plain(after)}


def score(rank: int, job: dict[str, Any]) -> list[list[float]]:
    """The trainer's logprobs of responses."""
    from rlk.train import process
    from rlk.train.batch import pair
    from rlk.train.trainer import MegatronTrainer

    torch.set_num_threads(1)
    requests = [Request.from_plain(row) for row in job["calls"][0]]
    answers = [Response.from_plain(row) for row in job["answers"]]
    try:
        trainer = MegatronTrainer(
            Path(job["checkpoint"]), tp=job["tp"], cp=job["cp"], rank=rank, port=job["port"], timeout=60, micro_batch_size=3
        )
        return trainer.score(pair(requests, answers))
    finally:
        process.stop()


def _plain(responses: list[Response]) -> list[dict[str, Any]]:
    return [asdict(response) for response in responses]


def _error(action: Any) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
