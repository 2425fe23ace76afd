"""Two runs of the matrix, of a baseline and of a candidate revision, held against each other: bytes, kernels, coverage, times.

Each run has its own verdict. This one says whether the candidate still computes the baseline's bytes; the digests that both runs recorded
decide. Times are reported and decide nothing.
"""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from rlk.acceptance.validate import cards, read_run, refuted, run_ids
from rlk.evidence.rundir import RunDirectory, new_run_id
from rlk.evidence.schema import CellRecord, Count, Finite, MatrixRow, Milliseconds, Record, Report, Status

ROLES = ("baseline", "candidate")
BYTES = ("equal", "close")
"""What the matrix expects of a cell whose values are compared between revisions; native arms and planted faults are judged in their run."""
SEPARATED = ("PYTHONPATH", "RLK_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "VLLM_CACHE_ROOT")
"""Environment variables that two revisions never share."""
NO_DIGESTS = "no digests recorded"


class RevisionRefused(ValueError):
    """Two revisions or runs that cannot be compared as asked; the message names the remedy."""


class Outcome(StrEnum):
    """What became of one cell of either matrix."""

    EQUAL = "equal"
    DIFFERENT = "different"
    NOT_COMPARABLE = "not comparable"
    JUDGED = "judged in its run"
    RED = "red"
    NEW = "new"
    GONE = "gone"
    NOT_SELECTED = "not selected"
    UNSUPPORTED = "unsupported"


class CellOutcome(Record):
    """One cell. values, elements: compared between the revisions. different: names of those whose bytes differ. detail: why, in words."""

    cell_id: str
    outcome: Outcome
    values: Count = 0
    elements: Count = 0
    different: tuple[str, ...] = ()
    detail: str = ""


class KernelChange(Record):
    """An operator whose kernel ids are not the same in both runs; an empty side did not run it."""

    op: str
    backend: str
    baseline: tuple[str, ...]
    candidate: tuple[str, ...]


class Samples(Record):
    """Samples of one timing in one run, milliseconds."""

    count: Count
    median: Milliseconds
    least: Milliseconds
    most: Milliseconds


class TimingChange(Record):
    """One timing that is in both runs. percent: (candidate / baseline − 1)·100 of the medians; higher is slower."""

    cell_id: str
    name: str
    baseline: Samples
    candidate: Samples
    percent: Finite


class Difference(Record):
    """One fact of the environment or the contract that is not the same in both runs."""

    name: str
    baseline: str
    candidate: str


class Side(Record):
    """One of the two runs."""

    sha: str
    dirty: bool
    run_id: str
    directory: str
    sealed: bool
    command: str
    status: Status
    schema_version: int
    machine: str


class Revision(Record):
    """``revision.json``: the verdict over two runs and all it rests on. ``cells`` has every cell of either matrix once. green_scopes: those
    that both runs were narrowed to, if they are green and equal."""

    schema_version: Literal[1] = 1
    run_id: str
    created_at: str
    command: str
    platform: str
    status: Status
    green_scopes: tuple[str, ...]
    reasons: tuple[str, ...]
    baseline: Side
    candidate: Side
    contract: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    matrix: tuple[MatrixRow, ...]
    cells: tuple[CellOutcome, ...]
    kernels: tuple[KernelChange, ...]
    unchanged_kernels: Count
    timings: tuple[TimingChange, ...]


def compare_runs(baseline: Path, candidate: Path, command: str) -> Revision:
    """Compare two run directories of one platform, of this or an earlier version of rlk.

    Raises RevisionRefused for two platforms, for one run on both sides, whole or as a shard, and for a run that is not whole, contradicts
    itself, is not what was sealed, or, unsealed, has a green cell that this version's judge refutes.
    """
    reports = _whole("baseline", baseline), _whole("candidate", candidate)
    if both := [run for run in run_ids(reports[0]) if run in run_ids(reports[1])]:
        raise RevisionRefused(f"both sides are run {both[0]}: run the suite once more, or name another directory")
    platforms = [report.session.platform for report in reports]
    if platforms[0] != platforms[1]:
        raise RevisionRefused(f"a run on {platforms[0]} against one on {platforms[1]}: bytes are compared within one platform")
    matrices = [{row.cell_id: row for row in report.matrix} for report in reports]
    records = [{record.cell_id: record for record in report.records} for report in reports]
    rows = {**matrices[0], **matrices[1]}
    cells = tuple(_outcome(cell_id, [m.get(cell_id) for m in matrices], [r.get(cell_id) for r in records]) for cell_id in rows)
    sides = _side(reports[0], RunDirectory(baseline)), _side(reports[1], RunDirectory(candidate))
    contract = tuple(_differences(*(_mapping(report, "numerics") for report in reports)))
    kernels, unchanged = _kernels(*records)
    reasons, status = _verdict(sides, cells, contract, records[0].keys())
    scopes = {report.verdict.green_scopes for report in reports}
    now = datetime.now(UTC)
    return Revision(
        run_id=new_run_id(now),
        created_at=now.isoformat(timespec="seconds"),
        command=command,
        platform=platforms[0],
        status=status,
        green_scopes=scopes.pop() if status is Status.PARTIAL and len(scopes) == 1 else (),
        reasons=tuple(reasons),
        baseline=sides[0],
        candidate=sides[1],
        contract=contract,
        environment=tuple(_differences(*map(_environment, reports))),
        matrix=tuple(rows.values()),
        cells=cells,
        kernels=kernels,
        unchanged_kernels=unchanged,
        timings=tuple(_timings(*records)),
    )


def _whole(role: str, path: Path) -> Report:
    report, problems = read_run(path)
    if report is None or problems:
        raise RevisionRefused(f"the {role} is no evidence, run it again: {'; '.join(problems)}")
    if not RunDirectory(path).sealed and (wrong := refuted(report)):
        raise RevisionRefused(f"the {role} is not sealed, and {wrong[0]}: `rlk validate --seal` it with its own commit, or run it again")
    return report


def _side(report: Report, directory: RunDirectory) -> Side:
    names = Counter(name for name, _ in cards(report))
    return Side(
        sha=report.provenance.sha,
        dirty=report.provenance.dirty,
        run_id=report.run_id,
        directory=str(directory.path),
        sealed=directory.sealed,
        command=report.command,
        status=report.verdict.status,
        schema_version=report.schema_version,
        machine=", ".join(f"{count} × {name}" for name, count in names.items()) or str(report.environment.get("cpu", "")),
    )


def _verdict(
    sides: Sequence[Side], cells: Sequence[CellOutcome], contract: Sequence[Difference], ran: Collection[str]
) -> tuple[list[str], Status]:
    """FAIL: a red run, or other bytes under one contract. MISSING: what was to be compared was not. PARTIAL: a run was narrowed.

    ran: cells of the baseline's run; one that it did not take part in is listed as gone, and leaves no gap in what was asked for.
    """
    failed: list[str] = []
    missing: list[str] = []
    for role, side in zip(ROLES, sides):
        if side.status in (Status.FAIL, Status.MISSING):
            (failed if side.status is Status.FAIL else missing).append(f"the {role}'s own run is {side.status}")
    by_outcome = {outcome: [c for c in cells if c.outcome is outcome] for outcome in Outcome}
    if contract:
        named = ", ".join(f"{d.name} {d.baseline} → {d.candidate}" for d in contract)
        count = len(by_outcome[Outcome.DIFFERENT])
        missing.append(f"the contracts differ ({named}): equal bytes are not promised, {count} cells have other bytes")
    elif by_outcome[Outcome.DIFFERENT]:
        failed.append(_listed(by_outcome[Outcome.DIFFERENT], "have other bytes"))
    if void := by_outcome[Outcome.NOT_COMPARABLE]:
        missing.append(_listed(void, f"are not comparable ({void[0].detail})"))
    if gone := [c for c in by_outcome[Outcome.GONE] if c.cell_id in ran]:
        missing.append(_listed(gone, "are required by the baseline and not by the candidate"))
    if not any(c.values for c in cells):
        missing.append("no value was compared between the revisions")
    if failed or missing:
        return [*failed, *missing], Status.FAIL if failed else Status.MISSING
    partial = any(side.status is Status.PARTIAL for side in sides)
    return [], Status.PARTIAL if partial else Status.PASS


def _listed(cells: Sequence[CellOutcome], what: str) -> str:
    return f"{len(cells)} cells {what}: {', '.join(c.cell_id for c in cells[:3])}{', …' if len(cells) > 3 else ''}"


def _outcome(cell_id: str, rows: Sequence[MatrixRow | None], records: Sequence[CellRecord | None]) -> CellOutcome:
    """What became of a cell: its row and its record in the baseline and in the candidate, None where it has none."""
    before, after = rows
    if before is None or after is None or before.unsupported or after.unsupported:
        required = [row is not None and not row.unsupported for row in rows]
        outcome = Outcome.GONE if required[0] else Outcome.NEW if required[1] else Outcome.UNSUPPORTED
        lacking = before if required[1] else after
        return CellOutcome(cell_id=cell_id, outcome=outcome, detail=lacking.unsupported if lacking else "")
    first, second = records
    if first is None or second is None:
        alone = [f"in the {role} alone" for role, record in zip(ROLES, records) if record is not None]
        return CellOutcome(cell_id=cell_id, outcome=Outcome.NOT_SELECTED, detail="".join(alone))
    red = [f"{role} {r.status}: {r.reasons[0]}" for role, r in zip(ROLES, (first, second)) if r.status is not Status.PASS]
    if red:
        return CellOutcome(cell_id=cell_id, outcome=Outcome.RED, detail="; ".join(red))
    if before.expect != after.expect:
        detail = f"the baseline expects {before.expect!r}, the candidate {after.expect!r}"
        return CellOutcome(cell_id=cell_id, outcome=Outcome.NOT_COMPARABLE, detail=detail)
    if after.expect not in BYTES:
        return CellOutcome(cell_id=cell_id, outcome=Outcome.JUDGED)
    return _compared(cell_id, _values(before, first), _values(after, second))


def _values(row: MatrixRow, record: CellRecord) -> dict[str, tuple[str, int]]:
    """Name → (digest, elements) of what the cell is judged on."""
    judged = record.accuracies if row.expect == "close" else record.comparisons
    return {value.name: (value.digest, value.elements) for value in judged}


def _compared(cell_id: str, before: Mapping[str, tuple[str, int]], after: Mapping[str, tuple[str, int]]) -> CellOutcome:
    common = [name for name in before if name in after]
    known = [name for name in common if before[name][0] and after[name][0]]
    different = tuple(name for name in known if before[name][0] != after[name][0])
    lost, fresh = [name for name in before if name not in after], [name for name in after if name not in before]
    details = []
    if len(known) < len(common):
        details.append(NO_DIGESTS)
    if lost:
        details.append(f"{len(lost)} values of the baseline are gone, first {lost[0]}")
    outcome = Outcome.DIFFERENT if different else Outcome.NOT_COMPARABLE if details or not known else Outcome.EQUAL
    if fresh:
        details.append(f"{len(fresh)} new values, first {fresh[0]}")
    elements = sum(after[name][1] for name in known)
    return CellOutcome(
        cell_id=cell_id, outcome=outcome, values=len(known), elements=elements, different=different, detail="; ".join(details)
    )


def _kernels(before: Mapping[str, CellRecord], after: Mapping[str, CellRecord]) -> tuple[tuple[KernelChange, ...], int]:
    """Operators whose kernel ids differ, and the number of those whose do not, over the cells that both runs have."""
    found: dict[tuple[str, str], tuple[set[str], set[str]]] = {}
    for cell_id in before.keys() & after.keys():
        for at, record in enumerate((before[cell_id], after[cell_id])):
            for use in record.kernels:
                found.setdefault((use.op, use.backend), (set(), set()))[at].add(use.kernel_id)
    changed = {key: ids for key, ids in sorted(found.items()) if ids[0] != ids[1]}
    changes = [
        KernelChange(op=op, backend=backend, baseline=tuple(sorted(old)), candidate=tuple(sorted(new)))
        for (op, backend), (old, new) in changed.items()
    ]
    return tuple(changes), len(found) - len(changed)


def _timings(before: Mapping[str, CellRecord], after: Mapping[str, CellRecord]) -> Iterable[TimingChange]:
    """Timings that both runs recorded; only green cells carry any."""
    for cell_id, record in before.items():
        found = after[cell_id].timings_ms if cell_id in after else {}
        for name, times in record.timings_ms.items():
            if times and found.get(name):
                old, new = _samples(times), _samples(found[name])
                yield TimingChange(cell_id=cell_id, name=name, baseline=old, candidate=new, percent=(new.median / old.median - 1) * 100)


def _samples(times: Sequence[float]) -> Samples:
    return Samples(count=len(times), median=statistics.median(times), least=min(times), most=max(times))


def _mapping(report: Report, name: str) -> dict[str, JsonValue]:
    found = report.environment.get(name)
    return found if isinstance(found, dict) else {}


def _environment(report: Report) -> dict[str, JsonValue]:
    """What both runs should share, one level deep: machine, packages, GPUs, environment variables."""
    flat: dict[str, JsonValue] = {}
    for name, value in report.environment.items():
        if name in ("numerics", "import_paths", "shards"):
            continue
        if name == "pytest_plugins" and isinstance(value, list):
            flat[name] = [plugin for plugin in value if os.sep not in str(plugin)]
        elif isinstance(value, dict):
            flat.update({f"{name} {key}": inner for key, inner in value.items() if key not in SEPARATED})
        else:
            flat[name] = value
    return flat


def _differences(before: Mapping[str, JsonValue], after: Mapping[str, JsonValue]) -> Iterable[Difference]:
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            yield Difference(name=name, baseline=str(before.get(name, "none")), candidate=str(after.get(name, "none")))
