"""vLLM's strict engine on two cards, over peer memory and over NCCL, against one card: graphs on and off, chunks, prefixes, reloads.

    OUT=. PYTHONPATH=. python tests/gpu/check_vllm_ranks.py [section ...]

Writes $OUT/check_vllm_ranks.json and exits 1 if a check failed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from check_vllm import SIZES, differing, everything, keep, kept, mixed, replays, requests, start
from report import Report, main

from rlk.parallel.transport import Transport
from rlk.rollout.vllm.wanted import TRANSPORTS

SHARDS = [[0, 1, 2, 3], [4, 5, 6, 7]]


def one(report: Report) -> None:
    """What the others are compared with."""
    engine, root = start("one", cudagraph_sizes=SIZES)
    keep("one", everything(engine, root))
    engine.close()


def two(transport: Transport, report: Report) -> None:
    """Two ranks over a transport, whose sums are in the captured graphs."""
    engine, root = start(transport, cudagraph_sizes=SIZES, tensor_parallel_size=2, transport=transport)
    ranks = engine.readback()["ranks"]
    report.holds("each rank holds its shards", [rank["shards"] for rank in ranks] == SHARDS, shards=[rank["shards"] for rank in ranks])
    report.holds("one model", len({rank["model_hash"] for rank in ranks}) == 1 and len({rank["shard_hash"] for rank in ranks}) == 2)
    report.holds("captured sizes", list(replays(engine)) == SIZES)
    keep(transport, everything(engine, root))
    before = replays(engine)
    sixteen = engine.generate(requests(16))
    moved = {size: count - before[size] for size, count in replays(engine).items() if count != before[size]}
    report.holds("a batch of a captured size replays its graph", list(moved) == [16], moved=moved)
    engine._ranks("_rlk_graphs", False)
    report.holds("graphs on and off", differing(engine.generate(requests(16)), sixteen) == 0)
    report.holds("none is replayed while they are off", replays(engine)[16] == before[16] + moved.get(16, 0))
    engine._ranks("_rlk_graphs", True)
    engine.reset_prefix_cache()
    whole = engine.generate(mixed())
    warm = engine.generate(mixed())
    report.holds("a warm prefix", differing(warm, whole) == 0 and any(r.cached_tokens for r in warm))
    engine.close()


def together(report: Report) -> None:
    """What the engines wrote down."""
    alone = kept("one")
    for transport in TRANSPORTS["cuda"]:
        found = kept(transport)
        for key, answers in alone.items():
            report.holds(f"two cards over {transport} against one", found[key] == answers, case=key)
    report.holds("new weights show", alone["reloaded"] != alone["chunks"])


if __name__ == "__main__":
    over: dict[str, Callable[[Report], None]] = {transport: partial(two, transport) for transport in TRANSPORTS["cuda"]}
    main("check_vllm_ranks", {"one": one, **over, "together": together}, alone="together")
