"""On one card or more: runs the cells of the cuda platform in sessions side by side, judges them together and writes what is kept:

    OUT=. PYTHONPATH=. python tests/gpu/run_cells.py [--seconds S] [--shards N] [--join DIR ...] [NAME ...]

NAME: a session (``ws2_0``) or all of a kind (``ws1 ws2 chain depth integration ablation mixed ranks``); without, all run. A session that
has not ended after S seconds is interrupted, and its cells are missing. --join: run directories of other sessions of the same sources,
which are judged together with those that run now; without a NAME nothing runs. One that was interrupted stays a fault of the whole: leave
its directory out and run that session again.

Leaves in $OUT each session's log and run directory (``sessions``), the joined one (``cuda``), ``ws1_h200.json``, ``ws2_h200.json`` and
``engines_h200.json``, and exits 1 unless every cell is green or waits for what is not here: published weights, or a second card. Needs a
clean checkout, or a copy with its ``rlk-manifest.json``, and a temporary folder that holds 40 GB and writes them fast.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from summarize_cells import summarize

from rlk.acceptance.cell import Cell
from rlk.acceptance.matrix import CHAIN_MODEL, SNAPSHOT_WORKLOAD, UPDATED_MODEL, WORKLOAD, enumerate_cells, several_cards
from rlk.acceptance.validate import merge
from rlk.acceptance.ws2 import TOPOLOGIES, subject
from rlk.contract.arms import ARMS, MIXED_MODES
from rlk.evidence.schema import Report
from rlk.kernels._native.build import cache_root

COMMAND = ("pytest", "-p", "no:cacheprovider", "-m", "cuda", "acceptance/")
SUMMARIES = {"ws1": ("ws1",), "ws2": ("ws2",), "engines": ("chain", "integration", "ablation", "control")}
"""Summary -> its scopes."""
GRACE_S = 25
"""What an interrupted session gets to write its report."""


@dataclass(frozen=True)
class Step:
    """One process on its cards: a session of pytest, or what prepares one. arguments: of the interpreter. summary: where a session's cells
    go, "" of no session; shown: its arguments there, since a list of cells would be too long."""

    name: str
    card: str
    arguments: tuple[str, ...]
    summary: str = ""
    shown: str = ""

    def chosen(self, names: Sequence[str]) -> bool:
        """Whether these names ask for it; none ask for everything."""
        return not names or self.name in names or self.name.partition("_")[0] in names

    def run(self, out: Path, deadline: float) -> None:
        """Until its end or the deadline."""
        began = time.monotonic()
        if began >= deadline:
            print(f"{self.name}: not begun, no time is left", flush=True)
            return
        command = [sys.executable, *self.arguments]
        if self.summary:
            command += ["--artifacts", str(out / "sessions" / self.name), "-q", "--tb=short"]
        with (out / f"session_{self.name}.log").open("w") as log:
            started = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "CUDA_VISIBLE_DEVICES": self.card})
            try:
                code = started.wait(deadline - began)
            except subprocess.TimeoutExpired:
                started.send_signal(signal.SIGINT)
                try:
                    code = started.wait(GRACE_S)
                except subprocess.TimeoutExpired:
                    started.kill()
                    code = started.wait()
        print(f"{self.name}: exit code {code}, {time.monotonic() - began:.0f} s", flush=True)


Plan: TypeAlias = Step | list["Plan"] | tuple["Plan", ...]
"""A list is done one after another, a tuple at once."""


def plan(cards: Sequence[str], shards: int) -> Plan:
    """All sessions, on the first two of these cards. Of a card's 140 GiB eight ranks of ws2 take 26, a strict engine and its trainer 20,
    native ones beside them 20 more, engines of several ranks 15, a shard of the operators up to 6, and the chain of the whole model 110 at
    its end. Engines of several ranks begin at once, since they wait for each other more than they compute."""
    first, last = cards[0], cards[:2][-1]
    topologies = tuple(_part(name, "ws2", first) for name in ("ws2_0", "ws2_1", "ws2_2"))
    several = {part_of(cell): cell.scope for cell in enumerate_cells("cuda") if cell.required and several_cards(cell)}
    ranks = tuple(_part(name, "ws2" if scope == "ws2" else "engines", ",".join(cards[:2])) for name, scope in several.items())
    rows = [_part("integration", "engines", first), _part("ablation", "engines", first)]
    others = tuple(_part(name, "engines", last) for name in ("chain", "mixed_0", "mixed_1", "mixed_2"))
    operators = tuple(_shard(i, shards, last) for i in range(1, shards + 1))
    weights, depth = _weights("depth_weights", CHAIN_MODEL["cuda"].name, last), _part("depth", "engines", last)
    if first == last:
        return [(weights, operators, others), (topologies, rows, ranks), depth]
    return (*topologies, rows, ranks, [(weights, *others, *operators), depth])


def steps(part: Plan) -> Iterator[Step]:
    """Every step of a plan."""
    if isinstance(part, Step):
        yield part
    else:
        for each in part:
            yield from steps(each)


def carry_out(part: Plan, names: Sequence[str], out: Path, deadline: float) -> None:
    """Run what these names choose of a plan."""
    if isinstance(part, Step):
        if part.chosen(names):
            part.run(out, deadline)
    elif isinstance(part, list):
        for each in part:
            carry_out(each, names, out, deadline)
    else:
        with ThreadPoolExecutor(len(part)) as pool:
            list(pool.map(lambda each: carry_out(each, names, out, deadline), part))


def hear_interrupts() -> None:
    """Let sessions be interrupted: a shell's background job ignores SIGINT, and so would what it starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _weights(name: str, shape: str, card: str) -> Step:
    """Synthetic weights of a shape, before a session asks for them."""
    imports = "from pathlib import Path; from acceptance.engines import synthetic_checkpoint; from rlk.loop.synthetic import SHAPES"
    return Step(name, card, ("-c", f"{imports}; print(synthetic_checkpoint(Path.cwd(), SHAPES[{shape!r}]))"))


def _shard(number: int, shards: int, card: str) -> Step:
    arguments = ("--scope", "ws1", "--shard", f"{number}/{shards}")
    return Step(f"ws1_{number}", card, ("-m", *COMMAND, *arguments), "ws1", " ".join(arguments))


def _part(name: str, summary: str, card: str) -> Step:
    cells = [cell.cell_id for cell in enumerate_cells("cuda") if cell.required and part_of(cell) == name]
    arguments = tuple(word for cell_id in cells for word in ("--cell", cell_id))
    return Step(name, card, ("-m", *COMMAND, *arguments), summary, f"--cell … ({name})")


def part_of(cell: Cell) -> str:
    """The session that runs a cell, "ws1" for all shards of the operators. Topologies are in thirds, each with what goes on from its
    training topologies, and so are arms whose engines mix operators and start anew for each."""
    if several_cards(cell):
        return f"ranks_{cell.scope}"
    if cell.scope == "chain":
        return "chain" if cell.workload == WORKLOAD["cuda"] else "depth"
    if cell.scope == "ws2":
        names = [subject(*pair) for pair in TOPOLOGIES]
        name = cell.subject.removeprefix("train-").removeprefix("rollout-").partition("-")[0]
        if name not in names:  # a planted fault
            return "ws2_2" if name.startswith("rollout_") else "ws2_1"
        return f"ws2_{names.index(name) % 3}"
    mixed = [arm.name for arm in ARMS if arm.mode("train") in MIXED_MODES]
    if cell.scope == "ablation" and cell.subject in mixed:
        return f"mixed_{mixed.index(cell.subject) % 3}"
    return "integration" if cell.scope == "control" else cell.scope


def waits_for(cell_id: str, reason: str) -> str:
    """What a missing cell wants and this machine lacks; "" for one that was lost. reason: its record's."""
    if SNAPSHOT_WORKLOAD in cell_id:
        return "published weights"
    lacks = re.search(r" needs (\d+ cards), here are \d", reason)
    return lacks[1] if lacks else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seconds", type=float, default=460.0)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--join", type=Path, nargs="+", default=[], metavar="DIR")
    asked = parser.parse_args()
    hear_interrupts()
    out, deadline = Path(os.environ.get("OUT", ".")).resolve(), time.monotonic() + asked.seconds
    if (out / "cuda").exists():
        parser.error(f"{out / 'cuda'} exists: set OUT to another folder")
    cards = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
    everything = plan(cards.split(","), asked.shards)
    if asked.names or not asked.join:
        _weights("weights", UPDATED_MODEL["cuda"].name, cards.partition(",")[0]).run(out, deadline)  # several sessions read them
        carry_out(everything, asked.names, out, deadline)
    merge([*asked.join, *sorted(path.parent for path in out.glob("sessions/**/report.json"))], out / "cuda")
    report = Report.model_validate_json((out / "cuda" / "report.json").read_bytes())
    unwell, reasons = len(report.session.trouble), {record.cell_id: "".join(record.reasons[-1:]) for record in report.records}
    for name, scopes in SUMMARIES.items():
        shown = " | ".join(step.shown for step in steps(everything) if step.summary == name)
        summary = summarize(out / "cuda", cache_root().with_name("vendor"), f"{' '.join(COMMAND)} {shown}", scopes)
        (out / f"{name}_h200.json").write_text(json.dumps(summary, indent=1) + "\n")
        waiting = Counter(filter(None, (waits_for(cell_id, reasons[cell_id]) for cell_id in summary["missing"])))
        lost = {cell_id: f"missing, {reasons[cell_id]}" for cell_id in summary["missing"] if not waits_for(cell_id, reasons[cell_id])}
        waits = "".join(f"; {count} wait for {what}" for what, count in waiting.items())
        print(f"{name}: {len(summary['green'])} of {summary['required']} green{waits}")
        for cell_id, why in {**summary["red"], **lost}.items():
            print(f"{cell_id}: {why}"[:300])
        unwell += len(summary["red"]) + len(lost)
    print(f"verdict {report.verdict.status.value}; trouble: {list(report.session.trouble)}")
    sys.exit(1 if unwell else 0)


if __name__ == "__main__":
    main()
