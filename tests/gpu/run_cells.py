"""On a card: runs the operator cells in shards at once, judges them together and writes the summary that is kept:

    OUT=. PYTHONPATH=. python tests/gpu/run_cells.py [number of shards [seconds]]

Shards that have not ended by then are ended, and their cells are missing. Leaves in $OUT the joined run directory ``ws1``,
``ws1_h200.json`` and each shard's log, and exits 1 unless every cell is green. Needs a clean checkout, or a copy with its
``rlk-manifest.json``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from summarize_cells import SCOPE, summarize

from rlk.acceptance.validate import merge
from rlk.kernels._native.build import cache_root

COMMAND = ("pytest", "-p", "no:cacheprovider", "-m", "cuda", "acceptance/", "--scope", SCOPE)


def main() -> None:
    count, limit = (*map(int, sys.argv[1:]), *(14, 3600)[len(sys.argv) - 1 :])
    out, folder, deadline = Path(os.environ.get("OUT", ".")), Path(tempfile.mkdtemp()), time.monotonic() + limit
    running = [
        subprocess.Popen(
            [sys.executable, "-m", *COMMAND, "--shard", f"{i}/{count}", "--artifacts", str(folder / str(i)), "-q", "--tb=short"],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for i in range(1, count + 1)
        for log in [(out / f"shard_{i}.log").open("w")]
    ]
    codes = [_ended(shard, deadline) for shard in running]
    print(f"{count} shards ended with {codes}", flush=True)  # 3: green, and a part; -9: ended here
    runs = sorted(path.parent for path in folder.glob("**/report.json"))
    merge(runs, out / SCOPE)
    summary = summarize(out / SCOPE, cache_root().with_name("vendor"), " ".join((*COMMAND, "--shard", f"1/{count} … {count}/{count}")))
    (out / "ws1_h200.json").write_text(json.dumps(summary, indent=1) + "\n")
    print(f"{len(summary['green'])} of {summary['required']} green; missing {len(summary['missing'])}")
    for cell_id, why in summary["red"].items():
        print(f"red {cell_id}: {why}")
    for cell_id in summary["missing"]:
        print(f"missing {cell_id}")
    sys.exit(0 if len(summary["green"]) == summary["required"] else 1)


def _ended(shard: subprocess.Popen[bytes], deadline: float) -> int:
    """Exit code of a shard, which is killed at the deadline."""
    try:
        return shard.wait(max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        shard.kill()
        return shard.wait()


if __name__ == "__main__":
    main()
