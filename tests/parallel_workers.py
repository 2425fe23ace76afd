"""What the worker processes of tests/test_parallel_*.py do; results are JSON."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlk.parallel.collectives import Group
from rlk.parallel.link import Link
from rlk.parallel.rendezvous import LOOPBACK, join, leave, require_own_card
from rlk.parallel.transport import Transport


@contextmanager
def group(
    rank: int, size: int, port: int, *, agreement: str = "same", timeout: float = 60, transport: Transport = "gloo"
) -> Iterator[Group]:
    """``transport`` "nccl" stands for what a rank does around NCCL's calls, here on calls of gloo."""
    link = join(
        rank, [f"rank {r}" for r in range(size)], port, agreement, timeout=timeout, transport="gloo" if transport == "nccl" else transport
    )
    link.transport = transport
    try:
        yield Group("world", link, dist.group.WORLD)
    finally:
        link.transport = "gloo"
        leave(link)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().view(torch.uint8).flatten().tolist()


def parts(size: int, count: int, seed: int) -> torch.Tensor:
    """fp32 [size, count] of very different magnitudes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-12, 12, (size, count), generator=generator)
    return torch.randn(size, count, generator=generator) * 2.0**exponents


def sums(rank: int, size: int, port: int, counts: Sequence[int], messages: Sequence[int], transport: Transport = "gloo") -> dict[str, Any]:
    """Tree sums of vectors of several lengths, at several message sizes, as bytes."""
    found: dict[str, Any] = {}
    with group(rank, size, port, transport=transport) as world:
        for count in counts:
            own = parts(size, count, count)[rank]
            for message in messages:
                world.link.message_bytes = message
                found[f"{count}/{message}"] = {
                    "fp32": bits(world.tree_all_reduce(own)),
                    "bf16": bits(world.tree_all_reduce(own, torch.bfloat16)),
                    "piece": bits(world.tree_reduce_scatter(own)),
                    "many": [bits(t) for t in world.tree_all_reduce_many([own, own.view(1, -1)[:, : count // 2], own[:0]])],
                }
        # The transport's own reduction, for comparison: whatever its order is, it is not promised.
        rows = world.link.traffic.rows()
    return {"sums": found, "traffic": rows}


def gathers(rank: int, size: int, port: int, transport: Transport = "gloo") -> list[Any]:
    """Tensors of every kind in one call: dtypes, a scalar, an empty one, a transposed view, −0 and NaN."""
    with group(rank, size, port, transport=transport) as world:
        sent = [
            torch.full((3,), rank, dtype=torch.uint8), torch.tensor(float(rank)), torch.zeros(0, 4),
            torch.arange(6).reshape(2, 3).t() + rank, torch.tensor([-0.0, float("nan"), 1.5 + rank]).bfloat16(),
            torch.tensor([rank % 2 == 0, True]),
        ]  # fmt: skip
        before = len(world.link.traffic.rows())
        received = world.all_gather_many(sent)
        assert len(world.link.traffic.rows()) == before + 2
        (nothing,) = world.all_gather_many([torch.zeros(0, 4, dtype=torch.bfloat16)])
        assert nothing.shape == (size, 0, 4)
        return [[list(t.shape), str(t.dtype), bits(t)] for t in received]


def together(rank: int, size: int, port: int) -> dict[str, Any]:
    """Shared texts, what rank 0 leads, and errors of one rank that all must hear of."""
    with group(rank, size, port) as world:
        link = world.link
        found: dict[str, Any] = {"share": link.share("é" * 300 * rank), "lead": link.lead(lambda: f"by {rank}")}

        def fail_on(loser: int) -> Callable[[], None]:
            def action() -> None:
                if rank == loser:
                    raise LookupError("planted")

            return action

        found["one fails"] = _error(lambda: link.together(fail_on(1)))
        found["first fails"] = _error(lambda: link.lead(lambda: str(fail_on(0)())))
        link.together(lambda: None)
        return found


def mismatch(rank: int, size: int, port: int, kind: str) -> str:
    """Ranks that ask for different things: every one must raise, none may hang."""
    if kind == "agreement":
        return _error(lambda: group(rank, size, port, agreement=f"version {1 + rank // (size - 1)}").__enter__())
    with group(rank, size, port, timeout=20) as world:
        odd = rank == size - 1
        if kind == "shape":
            return _error(lambda: world.tree_all_reduce(torch.ones(4 + odd)))
        if kind == "dtype":
            return _error(lambda: world.all_gather_many([torch.ones(4, dtype=torch.float64 if odd else torch.float32)]))
        if kind == "operation":
            return _error(lambda: world.tree_all_reduce(torch.ones(4)) if odd else world.all_gather_many([torch.ones(4)]))
        if kind == "unit":
            with world.link.unit("step", "same"):
                world.tree_all_reduce(torch.ones(4))
            return _error(lambda: world.link.unit("step", "36 tokens" if odd else "37 tokens").__enter__())
        raise ValueError(kind)


def first_use(rank: int, size: int, port: int) -> list[int]:
    """Number of checks in a first and in a second unit of one kind, and outside of units."""
    with group(rank, size, port) as world:
        counts = []
        for number in range(2):
            world.link.traffic.reset()
            with world.link.unit("step", f"data {number}"):
                world.tree_all_reduce(torch.ones(4))
            counts.append(_checks(world.link))
        world.link.traffic.reset()
        world.tree_all_reduce(torch.ones(4))
        return [*counts, _checks(world.link)]


def cards(rank: int, size: int, port: int, names: Sequence[str]) -> str:
    """What a rank with card names[rank] is told."""
    store = dist.TCPStore(LOOPBACK, port, size, rank == 0, timeout=timedelta(seconds=20))
    return _error(lambda: require_own_card(store, rank, [f"rank {r}" for r in range(size)], names[rank]))


def lost(rank: int, size: int, port: int, loser: int, way: str, timeout: float, transport: Transport = "gloo") -> dict[str, Any]:
    """One rank is lost between two sums; the others' error and the seconds that it took."""
    with group(rank, size, port, timeout=timeout, transport=transport) as world:
        world.tree_all_reduce(torch.ones(4))
        if rank == loser and way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == loser and way == "silent":
            time.sleep(3 * timeout + 6)
            return {}
        if rank == loser and way == "raises":
            raise LookupError("planted")
        start = time.monotonic()
        said = _error(lambda: [world.tree_all_reduce(torch.ones(4)) for _ in range(3)])
        return {"error": said, "seconds": time.monotonic() - start}


def _checks(link: Link) -> int:
    return sum(row["calls"] for row in link.traffic.rows() if row["op"] == "check")


def _error(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return json.dumps("no error")
