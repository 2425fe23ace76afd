"""What one rank of tests/gpu/check_nccl.py does, in a worker process; results are JSON."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from acceptance.topologies import synthetic_checkpoint
from rlk.contract.models import ModelShape
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.contract.update import GrpoParams
from rlk.parallel.collectives import Group
from rlk.parallel.rendezvous import join, leave
from rlk.train import process
from rlk.train.batch import Sample
from rlk.train.objective import BatchLoss
from rlk.train.trainer import MegatronTrainer


@contextmanager
def group(rank: int, job: dict[str, Any]) -> Iterator[Group]:
    """All ranks of the job, each with card ``rank``, or all with card 0."""
    torch.cuda.set_device(rank if job["cards"] > 1 else 0)
    labels = [f"rank {r}" for r in range(job["size"])]
    link = join(rank, labels, job["port"], "same", transport=job["transport"], timeout=job.get("timeout", 60.0))
    try:
        yield Group("world", link, dist.distributed_c10d._get_default_group())
    finally:
        leave(link)


def sums(rank: int, job: dict[str, Any]) -> list[str]:
    """Digest of the tree sum of every count, in fp32 and in bf16."""
    found = []
    with group(rank, job) as world:
        for count in job["counts"]:
            own = part(count, rank)
            for dtype in (torch.float32, torch.bfloat16):
                raw = world.tree_all_reduce(own, dtype).view(torch.uint8).cpu().numpy().tobytes()
                found.append(hashlib.sha256(raw).hexdigest())
    return found


def part(count: int, rank: int) -> torch.Tensor:
    """fp32 [count] of very different magnitudes."""
    generator = torch.Generator().manual_seed(1000 * count + rank)
    return (torch.randn(count, generator=generator) * 2.0 ** torch.randint(-12, 12, (count,), generator=generator)).cuda()


def lost(rank: int, job: dict[str, Any]) -> str:
    """Rank 1 dies between two sums."""
    with group(rank, job) as world:
        world.tree_all_reduce(part(1 << 20, rank))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            world.tree_all_reduce(part(1 << 20, rank))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


def update(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Two updates: figures and digests, and for the second one seconds of forward and backward, and of that the card's seconds in NCCL."""
    torch.cuda.set_device(rank if job["cards"] > 1 else 0)
    try:
        trainer = MegatronTrainer(
            Path(job["checkpoint"]), tp=job["tp"], cp=job["cp"], rank=rank, port=job["port"], timeout=120.0, micro_batch_size=2,
            device="cuda", transport=job["transport"],
        )  # fmt: skip
        held = samples(job["lengths"])
        rewards, groups = [float(i % 2) for i in range(len(held))], [0] * len(held)
        steps = []
        for _ in range(2):
            steps.append(trainer.step(held, rewards, groups, trainer.score(held), lr=1e-5).as_dict())
        result: dict[str, Any] = {"steps": steps, "scores": trainer.score(held)}
        old = trainer.score(held)

        def forward_and_backward() -> float:
            loss = BatchLoss(held, rewards, groups, old, None, GrpoParams())
            trainer.optimizer.zero_gradients()
            trainer.parallel.link.traffic.reset()
            trainer.parallel.link.checking = False
            torch.cuda.synchronize()
            start = time.perf_counter()
            for batch in trainer._batches(held):
                trainer.model.accumulate(batch, partial(loss.seeds, batch))
            torch.cuda.synchronize()
            return time.perf_counter() - start

        result["seconds"] = [forward_and_backward() for _ in range(4)][1:]
        result["traffic"] = trainer.parallel.link.traffic.rows()
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            forward_and_backward()
        spent = {event.key: event.device_time_total / 1e6 for event in recorded.key_averages()}
        result["device_seconds"] = sum(spent.values())
        result["nccl_seconds"] = sum(value for key, value in spent.items() if "nccl" in key.lower())
        return result
    finally:
        process.stop()


def samples(lengths: list[list[int]]) -> list[Sample]:
    """Samples of (prompt, response) tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda count: tuple(torch.randint(0, 256, (count,), generator=generator).tolist())
    made = []
    for i, (prompt, answer) in enumerate(lengths):
        ids, tokens = draw(prompt), draw(answer)
        made.append(Sample(Request(i, ids, SamplingParams()), Response(i, ids, tokens, (0.0,) * answer, None, "length", 0, 0)))
    return made


def checkpoint(rank: int, path: str, shape: dict[str, Any]) -> None:
    """Random weights of a shape, made by one worker."""
    synthetic_checkpoint(Path(path), ModelShape(**shape))
