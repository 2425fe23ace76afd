"""Sums over cards of one host, and a decoder layer of tensor parallel ranks around them: the contract's tree against NCCL's all-reduce.

    PYTHONPATH=. python3 benchmarks/distributed/tree_sum.py results.json [cards]

One process per card. Every arm is a CUDA graph of several calls, arms alternate, times are microseconds per call: quartiles over replays,
of the slowest rank; "eager" arms are calls without a graph, the host included. A layer is timed with its sums, with none (compute), and
with NCCL's own bf16 all-reduce in their place, as an engine would have it. Bytes come first: a sum that is not the tree of adjacent pairs
shows no time, nor does a layer whose replayed graph differs from the whole layer on one card.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rlk.contract.models import QWEN3_8B
from rlk.contract.numerics import HOPPER
from rlk.contract.orders import fold_pairs
from rlk.kernels.attention import attention
from rlk.kernels.rope import rope_table
from rlk.loop.labels import shape_config
from rlk.model.layout import packed_shapes
from rlk.model.qwen3 import Qwen3Layer, decoder_layer
from rlk.model.shards import part as shard
from rlk.model.shards import part_shape
from rlk.parallel.collectives import ALONE, Group
from rlk.parallel.link import Link
from rlk.parallel.pool import Pool, free_port, require
from rlk.parallel.rendezvous import join, leave

BYTES = tuple(1 << power for power in (12, 14, 16, 18, 20, 22, 24, 26))
"""Of fp32 parts."""
ROWS = (16, 128, 1, 1024, 4096)
REPLAYS = 15
Arms = dict[str, Callable[[], Any]]
FORMS = ("whole", "sliced")
LAUNCHES = ((132, 4096), (132, 1024), (64, 4096), (32, 4096))
"""Forms, blocks and vectors of a step of ``rlk.parallel.peer``; "tree" is what it takes by itself."""


class Stub:
    """Stands where a layer expects its group: the parts of this rank alone, or NCCL's sum of them after rounding."""

    def __init__(self, size: int, rank: int, nccl: bool) -> None:
        self.size, self.rank, self._nccl = size, rank, nccl

    def tree_all_reduce(self, part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        rounded = part.to(dtype)
        if self._nccl:
            dist.all_reduce(rounded)
        return rounded


def sums(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Quartiles by bytes of a part and arm."""
    with_link = _join(rank, job)
    try:
        group, rows = _peers(with_link), {}
        for size in BYTES:
            part = _random(size // 4, rank)
            wanted = fold_pairs([_random(size // 4, r) for r in range(job["cards"])], torch.add)
            own, half = torch.zeros_like(part), torch.zeros_like(part, dtype=torch.bfloat16)
            arms: Arms = {"nccl fp32": partial(dist.all_reduce, own), "nccl bf16": partial(dist.all_reduce, half)}
            differ = []
            for dtype, name in ((torch.float32, "fp32"), (torch.bfloat16, "bf16")):
                tried: Arms = {f"tree {name}": partial(group.tree_all_reduce, part, dtype)}
                for form, (blocks, slot) in product(FORMS, LAUNCHES):
                    tried[f"{form} {name} {blocks}x{slot}"] = partial(group._mover.summed, part, dtype, form, blocks, slot)  # type: ignore[union-attr]
                same = _everywhere([torch.equal(run().view(torch.uint8), wanted.to(dtype).view(torch.uint8)) for run in tried.values()])
                differ += [arm for arm, equal in zip(tried, same) if not equal]
                arms |= {arm: run for (arm, run), equal in zip(tried.items(), same) if equal}
            eager = {f"eager {arm}": _eager(arms[arm]) for arm in ("nccl fp32", "tree fp32") if arm in arms}
            rows[str(size)] = {"differ": differ, **_timed(arms, 20 if size <= 1 << 22 else 5), **eager}
        return rows
    finally:
        leave(with_link)


def layers(rank: int, job: dict[str, Any]) -> dict[str, Any]:
    """Quartiles by rows and arm of one layer of Qwen3-8B at TP = cards, and of the whole layer on one; a row is a token of one sequence."""
    with_link = _join(rank, job)
    try:
        group, found = _peers(with_link), {}
        config, card = shape_config(QWEN3_8B), torch.device("cuda")
        shapes = {name[9:]: shape for name, shape in packed_shapes(config, HOPPER).items() if name.startswith("layers.0.")}
        whole = Qwen3Layer(shapes, card)
        layer = Qwen3Layer({name: part_shape(name, shape, group) for name, shape in shapes.items()}, card)
        torch.manual_seed(0)
        for (name, parameter), (_, part) in zip(whole.named_parameters(), layer.named_parameters(), strict=True):
            parameter.data.copy_(torch.randn(shapes[name], device=card) * (1.0 if len(shapes[name]) == 1 else shapes[name][1] ** -0.5))
            part.data.copy_(shard(name, parameter.data, group))
        table = rope_table(config.head_dim, config.rope_theta, max(ROWS)).to(card)
        for count in ROWS:
            x, positions = torch.randn(count, config.hidden_size, device=card).bfloat16(), torch.arange(count, device=card)
            attend = partial(_attend, torch.tensor([0, count], device=card), config.attention_scale)

            def run(
                held: Qwen3Layer, tp: Any, x: torch.Tensor = x, positions: torch.Tensor = positions, attend: Any = attend
            ) -> torch.Tensor:
                return decoder_layer(x, held.ops(attend, config, HOPPER, tp), positions, table, config, HOPPER, None, "")

            stubs = {"compute alone": Stub(group.size, rank, False), "nccl bf16": Stub(group.size, rank, True)}
            with torch.no_grad():
                arms: Arms = {"one card": partial(run, whole, ALONE), **{name: partial(run, layer, tp) for name, tp in stubs.items()}}
                graph, replayed = _graph(partial(run, layer, group), 1)
                graph.replay()
                (same,) = _everywhere([torch.equal(replayed.view(torch.uint8), arms["one card"]().view(torch.uint8))])
                differ = [] if same else ["tree"]
                arms |= {"tree": partial(run, layer, group)} if same else {}
                found[str(count)] = {"differ": differ, **_timed(arms, 5)}
            if rank == 0:
                print("layer", count, found[str(count)], flush=True)
        return found
    finally:
        leave(with_link)


def _attend(offsets: torch.Tensor, scale: float, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v, offsets, scale=scale, kv_tile=HOPPER.kv_tile, kv_split=HOPPER.kv_split).flatten(1)


def _join(rank: int, job: dict[str, Any]) -> Link:
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    return join(rank, [f"rank {r}" for r in range(job["cards"])], job["port"], "same", transport="nccl", timeout=60.0)


def _peers(link: Link) -> Group:
    """All ranks as a group whose cards write each other's memory; NCCL stays for what it is compared with."""
    link.transport, link.checking = "peer", False
    return Group("tp", link, dist.distributed_c10d._get_default_group())


def _everywhere(held: list[bool]) -> list[bool]:
    """Which facts hold on every rank."""
    flags = torch.tensor(held, dtype=torch.int32, device="cuda")
    dist.all_reduce(flags, dist.ReduceOp.MIN)
    return [bool(flag) for flag in flags.tolist()]


def _random(count: int, rank: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(count + rank)
    return torch.randn(count, generator=generator, device="cuda")


def _graph(run: Callable[[], Any], calls: int) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of several calls after one that compiles, and what its last call returns."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            result = run()
    return graph, result


def _eager(run: Callable[[], Any], calls: int = 20) -> list[float]:
    """Quartiles of microseconds per call of the host's clock."""
    times = []
    for _ in range(REPLAYS):
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6 / calls)
    return [round(q, 2) for q in statistics.quantiles(times, n=4)]


def _timed(arms: Arms, calls: int) -> dict[str, list[float]]:
    graphs, together = {name: _graph(run, calls)[0] for name, run in arms.items()}, torch.zeros(1, device="cuda")
    measured: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(REPLAYS + 2):
        for name, graph in graphs.items():
            dist.all_reduce(together)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            measured[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return {name: [round(q, 2) for q in statistics.quantiles(times[2:], n=4)] for name, times in measured.items()}


def slowest(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Of every row and arm the rank with the largest median."""
    return {
        row: {arm: max((rank[row][arm] for rank in ranks), key=lambda t: t[1] if t and arm != "differ" else 0) for arm in arms}
        for row, arms in ranks[0].items()
    }


def main() -> None:
    target, cards = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else torch.cuda.device_count()
    found: dict[str, Any] = {
        "cards": cards, "device": torch.cuda.get_device_name(), "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())), "microseconds": "quartiles of the slowest rank",
    }  # fmt: skip
    with Pool(cards) as pool:
        for name in ("sums", "layers"):
            job = {"cards": cards, "port": free_port()}
            found[name] = slowest(require(pool.run(cards, Path(__file__), name, job, timeout=120)))
            target.write_text(json.dumps(found, indent=1) + "\n")
            for row, arms in found[name].items():
                print(name, row, {arm: times[1] if arm != "differ" else times for arm, times in arms.items()}, flush=True)


if __name__ == "__main__":
    main()
