"""Writes the summary of an operator run on a card, small enough to keep with the sources:

    python tests/gpu/summarize_cells.py <run directory> <folder of vendor certificates> <command> benchmarks/results/ws1_h200.json

The run directory itself, one session's or joined from shards, stays the evidence; the summary names its files by digest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rlk.acceptance.cell import Cell
from rlk.acceptance.matrix import RANK_FACTS, several_cards
from rlk.acceptance.validate import validate_run
from rlk.evidence.rundir import RunDirectory
from rlk.evidence.schema import Report, Status

SCOPE = "ws1"


def summarize(directory: Path, certificates: Path, command: str, scopes: Collection[str] = (SCOPE,)) -> dict[str, Any]:
    """What ran, where, on which sources, how every cell of these scopes ended, and the ranks of those that want several cards.

    Raises ValueError for a directory that does not hold together.
    """
    if problems := validate_run(directory):
        raise ValueError(f"{directory}: {problems[0]}")
    report = Report.model_validate_json((directory / "report.json").read_bytes())
    environment, gpu = report.environment, report.environment["gpus"][0]
    records = [r for r in report.records if r.cell_id.split("/")[1] in scopes]
    ended = {status: [r for r in records if r.status is status] for status in Status}
    spread = {row.cell_id for row in report.matrix if several_cards(Cell.from_row(row))}
    used = {(use.op, use.backend, use.kernel_id) for record in ended[Status.PASS] for use in record.kernels}
    return {
        "run_id": report.run_id,
        "date": report.started_at[:10],
        "command": command,
        "commit": report.provenance.sha,
        "dirty": report.provenance.dirty,
        "tree_digest": report.provenance.tree_digest,
        "card": gpu["name"],
        "driver": gpu["driver_clocks_power"].split(",")[0],
        "cuda": environment["cuda"],
        "packages": environment["packages"],
        "required": len(records),
        "green": [r.cell_id for r in ended[Status.PASS]],
        "red": {r.cell_id: r.reasons[0] for r in ended[Status.FAIL]},
        "missing": [r.cell_id for r in ended[Status.MISSING]],
        "several_cards": {r.cell_id: {name: r.facts[name] for name in RANK_FACTS} for r in ended[Status.PASS] if r.cell_id in spread},
        "elements_compared": sum(r.elements for r in records),
        "kernels": {kernel_id: sorted(op for op, _, k in used if k == kernel_id) for kernel_id in sorted({k for *_, k in used})},
        "vendor": _certificates(certificates),
        "trouble": list(report.session.trouble),
        "files": RunDirectory(directory).digests(),
    }


def _certificates(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Operator → what each of its certificates on this machine holds for, and how many problems it names."""
    found: dict[str, list[dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        certificate = json.loads(path.read_text())
        found.setdefault(path.name.rpartition("-")[0], []).append({**certificate, "certified": len(certificate["certified"])})
    return found


if __name__ == "__main__":
    run, folder, asked, target = sys.argv[1:]
    Path(target).write_text(json.dumps(summarize(Path(run), Path(folder), asked), indent=1) + "\n")
