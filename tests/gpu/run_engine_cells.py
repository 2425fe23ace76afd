"""On a card: runs the cells of real vLLM and real Megatron-core, two sessions one after the other, judges them together and writes the
summary that is kept:

    OUT=. PYTHONPATH=. python tests/gpu/run_engine_cells.py

Leaves in $OUT the joined run directory ``engines``, ``engines_h200.json`` and each session's log, and exits 1 unless every cell is green or
waits for published weights. Needs a clean checkout, or a copy with its ``rlk-manifest.json``, and 110 GB of the card for the chain.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from summarize_cells import summarize

from rlk.acceptance.matrix import SNAPSHOT_WORKLOAD
from rlk.acceptance.validate import merge
from rlk.evidence.schema import Report
from rlk.kernels._native.build import cache_root

SESSIONS = (("chain",), ("integration", "ablation", "control"))
COMMAND = ("pytest", "-p", "no:cacheprovider", "-m", "cuda", "acceptance/")


def main() -> None:
    chosen = [scopes for scopes in SESSIONS if not sys.argv[1:] or scopes[0] in sys.argv[1:]]
    out, folder = Path(os.environ.get("OUT", ".")), Path(tempfile.mkdtemp())
    commands = []
    for scopes in chosen:
        began = time.monotonic()
        commands.append([*COMMAND, *(word for scope in scopes for word in ("--scope", scope))])
        with (out / f"session_{scopes[0]}.log").open("w") as log:
            ran = subprocess.run(
                [sys.executable, "-m", *commands[-1], "--artifacts", str(folder / scopes[0]), "-q", "--tb=short"],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        print(f"{', '.join(scopes)}: exit code {ran.returncode}, {time.monotonic() - began:.0f} s", flush=True)
    runs = sorted(path.parent for path in folder.glob("**/report.json"))
    merge(runs, out / "engines")
    command = " && ".join(" ".join(words) for words in commands)
    summary = summarize(out / "engines", cache_root().with_name("vendor"), command, [scope for scopes in chosen for scope in scopes])
    report = Report.model_validate_json((out / "engines" / "report.json").read_bytes())
    summary["trouble"] = list(report.session.trouble)
    (out / "engines_h200.json").write_text(json.dumps(summary, indent=1) + "\n")
    waiting = [cell_id for cell_id in summary["missing"] if SNAPSHOT_WORKLOAD in cell_id]
    print(f"{len(summary['green'])} of {summary['required']} green; {len(waiting)} wait for published weights")
    for cell_id, why in summary["red"].items():
        print(f"red {cell_id}: {why}")
    lost = [cell_id for cell_id in summary["missing"] if cell_id not in waiting]
    print(*(f"missing {cell_id}" for cell_id in lost), sep="\n")
    sys.exit(0 if not summary["red"] and not lost else 1)


if __name__ == "__main__":
    main()
