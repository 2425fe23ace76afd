"""On one card or more: runs the cells of the cuda platform in sessions side by side, judges them together and writes what is kept:

    OUT=. PYTHONPATH=. python tests/gpu/run_cells.py [--seconds S] [--shards N] [--join DIR ...]
        [ws1 ws2 chain depth integration ablation mixed]

Names choose sessions; without, all run. A session that has not ended after S seconds is interrupted, and its cells are missing. --join
judges run directories ``cuda`` of sessions that were chosen one by one, and runs nothing.

Leaves in $OUT the joined run directory ``cuda``, ``ws1_h200.json``, ``ws2_h200.json``, ``engines_h200.json`` and each session's log, and
exits 1 unless every cell is green or waits for published weights. Needs a clean checkout, or a copy with its ``rlk-manifest.json``, on a
disk that holds 20 GB and writes them fast.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from summarize_cells import summarize

from acceptance.engines import synthetic_checkpoint
from rlk.acceptance.cell import Cell
from rlk.acceptance.matrix import SNAPSHOT_WORKLOAD, UPDATED_MODEL, WORKLOAD, enumerate_cells
from rlk.acceptance.validate import merge
from rlk.acceptance.ws2 import TOPOLOGIES, subject
from rlk.contract.arms import ARMS, MIXED_MODES
from rlk.evidence.schema import Report
from rlk.kernels._native.build import cache_root

COMMAND = ("pytest", "-p", "no:cacheprovider", "-m", "cuda", "acceptance/")
SUMMARIES = {"ws1": ("ws1",), "ws2": ("ws2",), "engines": ("chain", "integration", "ablation", "control")}
"""Summary -> its scopes."""
GRACE_S = 20
"""What an interrupted session gets to write its report."""


@dataclass(frozen=True)
class Session:
    """One run of pytest on one card. summary: where its cells go. shown: its arguments there; a list of cells would be too long."""

    name: str
    summary: str
    card: str
    arguments: tuple[str, ...]
    shown: str

    def run(self, folder: Path, out: Path, deadline: float) -> None:
        """Until its end or the deadline."""
        began = time.monotonic()
        command = [sys.executable, "-m", *COMMAND, *self.arguments, "--artifacts", str(folder / self.name), "-q", "--tb=short"]
        with (out / f"session_{self.name}.log").open("w") as log:
            started = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "CUDA_VISIBLE_DEVICES": self.card})
            try:
                code = started.wait(max(0.0, deadline - began))
            except subprocess.TimeoutExpired:
                started.send_signal(signal.SIGINT)
                try:
                    code = started.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    started.kill()
                    code = started.wait()
        print(f"{self.name}: exit code {code}, {time.monotonic() - began:.0f} s", flush=True)


def sessions(cards: Sequence[str], shards: int) -> list[list[list[Session]]]:
    """All sessions: lanes of groups. Lanes run side by side, groups of a lane one after another, sessions of a group at once. cards: their
    numbers, of which two are used."""
    first, last = cards[0], cards[:2][-1]
    topologies = [_part(name, "ws2", first) for name in ("ws2_0", "ws2_1")]
    engines = [_part(name, "engines", first) for name in ("ablation", "integration", "chain")]
    mixed = [_part(f"mixed_{i}", "engines", last) for i in range(3)]
    operators = [_shard(i, shards, last) for i in range(1, shards + 1)]
    depth = [_part("depth", "engines", last)]
    if first == last:
        return [[[*engines, *operators], [*topologies, *mixed], depth]]
    return [[[*topologies, *engines]], [[*depth, *mixed, *operators]]]


def _shard(number: int, shards: int, card: str) -> Session:
    arguments = ("--scope", "ws1", "--shard", f"{number}/{shards}")
    return Session(f"ws1_{number}", "ws1", card, arguments, " ".join(arguments))


def _part(name: str, summary: str, card: str) -> Session:
    cells = [cell.cell_id for cell in enumerate_cells("cuda") if cell.required and part_of(cell) == name]
    return Session(name, summary, card, tuple(word for cell_id in cells for word in ("--cell", cell_id)), f"--cell … ({name})")


def part_of(cell: Cell) -> str:
    """The session that runs a cell. Topologies are in two halves, each with what goes on from its training topologies; arms whose engines
    mix operators, and so start anew for each, are in thirds."""
    if cell.scope == "chain":
        return "chain" if cell.workload == WORKLOAD["cuda"] else "depth"
    if cell.scope == "ws2":
        names = [subject(*pair) for pair in TOPOLOGIES]
        name = cell.subject.removeprefix("train-").removeprefix("rollout-").partition("-")[0]
        return f"ws2_{names.index(name) % 2 if name in names else 0}"
    mixed = [arm.name for arm in ARMS if arm.mode("train") in MIXED_MODES]
    if cell.scope == "ablation" and cell.subject in mixed:
        return f"mixed_{mixed.index(cell.subject) % 3}"
    return "integration" if cell.scope == "control" else cell.scope


def _run(lane: Sequence[Sequence[Session]], names: Sequence[str], folder: Path, out: Path, deadline: float) -> None:
    for group in lane:
        chosen = [session for session in group if not names or session.name.partition("_")[0] in names]
        with ThreadPoolExecutor(max(1, len(chosen))) as pool:
            list(pool.map(partial(Session.run, folder=folder, out=out, deadline=deadline), chosen))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=460.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--join", type=Path, nargs="+", default=[])
    asked = parser.parse_args()
    out, folder, deadline = Path(os.environ.get("OUT", ".")), Path(tempfile.mkdtemp()), time.monotonic() + asked.seconds
    cards = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    lanes = sessions(cards.split(","), asked.shards)
    if not asked.join:
        synthetic_checkpoint(Path.cwd(), UPDATED_MODEL["cuda"])  # several sessions read it
        with ThreadPoolExecutor(len(lanes)) as pool:
            list(pool.map(partial(_run, names=asked.names, folder=folder, out=out, deadline=deadline), lanes))
    merge(asked.join or sorted(path.parent for path in folder.glob("**/report.json")), out / "cuda")
    report = Report.model_validate_json((out / "cuda" / "report.json").read_bytes())
    unwell = len(report.session.trouble)
    for name, scopes in SUMMARIES.items():
        shown = " | ".join(session.shown for lane in lanes for group in lane for session in group if session.summary == name)
        summary = summarize(out / "cuda", cache_root().with_name("vendor"), f"{' '.join(COMMAND)} {shown}", scopes)
        (out / f"{name}_h200.json").write_text(json.dumps(summary, indent=1) + "\n")
        waiting = [cell_id for cell_id in summary["missing"] if SNAPSHOT_WORKLOAD in cell_id]
        lost = [cell_id for cell_id in summary["missing"] if cell_id not in waiting]
        print(f"{name}: {len(summary['green'])} of {summary['required']} green; {len(waiting)} wait for published weights")
        for cell_id, why in {**summary["red"], **dict.fromkeys(lost, "missing")}.items():
            print(f"{cell_id}: {why}"[:300])
        unwell += len(summary["red"]) + len(lost)
    print(f"verdict {report.verdict.status.value}; trouble: {list(report.session.trouble)}")
    sys.exit(1 if unwell else 0)


if __name__ == "__main__":
    main()
