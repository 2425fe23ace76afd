"""On two cards: tree sums over every transport, training at TP2 and CP2 over NCCL and over peer memory against one card, a lost rank.

    OUT=. PYTHONPATH=. python tests/gpu/check_nccl.py

Writes $OUT/check_nccl.json after every section and exits 1 if a check failed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rlk.acceptance.ws2 import WIDE
from rlk.contract.models import TINY
from rlk.parallel.pool import Outcome, Pool, free_port, require

RANKS = Path(__file__).with_name("nccl_ranks.py")
COUNTS = (1, 3, 1000, 1 << 16, (1 << 16) + 5, 1 << 20)
SHORT = ((5, 9), (17, 48), (1, 1), (33, 17), (70, 31))
LONG = ((1024, 1024), (1000, 1048))


def main() -> None:
    started, failed = time.time(), []
    found: dict[str, Any] = {}
    with Pool(2) as pool:

        def run(size: int, cards: int, function: str, timeout: float = 200, **job: Any) -> list[Outcome]:
            job = {"size": size, "cards": cards, "port": free_port() if size > 1 else 0, "transport": "nccl", **job}
            return pool.run(size, RANKS, function, job, timeout=timeout)

        def section(name: str, action: Callable[[], Any]) -> None:
            began = time.time()
            try:
                found[name] = action()
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
                failed.append(name)
            print(f"{'FAIL' if name in failed else 'ok  '} {name}: {str(found[name])[:700]}  ({time.time() - began:.1f} s)", flush=True)
            facts = {**found, "failed": failed, "seconds": round(time.time() - started, 1)}
            (Path(os.environ.get("OUT", ".")) / "check_nccl.json").write_text(json.dumps(facts, indent=1) + "\n")

        def holds(condition: bool, *facts: Any) -> None:
            if not condition:
                raise AssertionError(*facts)

        def equal_sums() -> str:
            digests = {t: require(run(2, 2, "sums", counts=COUNTS, transport=t)) for t in ("nccl", "gloo", "ipc", "peer")}
            holds(all(rank == digests["gloo"][0] for ranks in digests.values() for rank in ranks), digests)
            return f"{len(COUNTS)} counts over {', '.join(digests)}"

        def lost_rank() -> str:
            outcomes = run(2, 2, "lost")
            said = str(outcomes[0].value or outcomes[0].error)
            holds("PeerLostError" in said and "rank 1 is gone" in said, said)
            return said

        def shared_card() -> str:
            said = run(2, 1, "sums", counts=COUNTS)[1].error
            holds("share card" in said, said)
            return said.splitlines()[0]

        def training(shape: Any, lengths: Any) -> dict[str, Any]:
            path = Path(tempfile.mkdtemp()) / shape.name
            require(pool.run(1, RANKS, "checkpoint", str(path), asdict(shape)))
            common = {"checkpoint": str(path), "lengths": lengths}
            (alone,) = require(run(1, 1, "update", tp=1, cp=1, **common))
            rows = {"tp1cp1": figures(alone)}
            for tp, cp, transport in ((2, 1, "nccl"), (1, 2, "nccl"), (2, 1, "peer"), (1, 2, "peer")):
                ranks, name = require(run(2, 2, "update", tp=tp, cp=cp, transport=transport, **common)), f"tp{tp}cp{cp} {transport}"
                rows[name] = figures(ranks[0])
                for rank in ranks:
                    holds(rank["steps"] == alone["steps"] and rank["scores"] == alone["scores"], f"{name} differs", rank["steps"])
            return rows

        section("equal sums", equal_sums)
        section("lost rank", lost_rank)
        section("shared card", shared_card)
        section("tiny", lambda: training(TINY, SHORT))
        section("wide, uneven", lambda: training(WIDE, SHORT))
        section("wide, 4096 tokens", lambda: training(replace(WIDE, max_positions=2048), LONG))
    print(f"check_nccl: {len(failed)} sections failed, {time.time() - started:.1f} s")
    sys.exit(1 if failed else 0)


def figures(rank: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a rank's update."""
    norms = [step["grad_norm"] for step in rank["steps"]]
    hashes = [step["model_hash_after"] for step in rank["steps"]]
    return {"grad_norms": norms, "model_hashes": hashes} | {k: rank[k] for k in ("seconds", "device_seconds", "nccl_seconds", "traffic")}


if __name__ == "__main__":
    main()
