"""The verdict: pure functions from evidence to a cell's status, and from all records to the session's. Nothing here can be configured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from rlk.acceptance.cell import Cell, Platform
from rlk.evidence.bytes import describe
from rlk.evidence.schema import CellRecord, Comparison, Control, KernelUse, Status, Verdict

BACKENDS_OF: Mapping[Platform, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton", "vendor"), "rocm": ("triton", "vendor")}
EXIT_CODE = {Status.PASS: 0, Status.FAIL: 1, Status.MISSING: 1, Status.PARTIAL: 3}


@dataclass
class Findings:
    """What a cell's test handed in."""

    comparisons: list[Comparison] = field(default_factory=list)
    kernels: list[KernelUse] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)
    facts: dict[str, JsonValue] = field(default_factory=dict)
    timings_ms: dict[str, tuple[float, ...]] = field(default_factory=dict)


def judge_cell(cell: Cell, findings: Findings, trouble: Sequence[str], declared: Mapping[str, Collection[str]]) -> CellRecord:
    """Status of one cell.

    trouble: what the test itself ran into (exception, skip, xfail); any entry fails the cell.
    declared: kernel id → operators that may report it, computed here from the sources, so that a forged id is not accepted.
    """
    reasons = [*trouble]
    reasons += _expectation(cell, findings)
    reasons += _kernels(cell, findings, declared)
    reasons += [f"fact {name!r} is missing" for name in cell.facts if findings.facts.get(name) in (None, "", [], {})]
    return CellRecord(
        cell_id=cell.cell_id,
        status=Status.FAIL if reasons else Status.PASS,
        reasons=tuple(reasons),
        comparisons=tuple(findings.comparisons),
        kernels=tuple(findings.kernels),
        controls=tuple(findings.controls),
        facts=findings.facts,
        timings_ms={} if reasons else findings.timings_ms,
    )


def _expectation(cell: Cell, findings: Findings) -> list[str]:
    if cell.expect == "caught":
        if not findings.controls:
            return ["no control was run"]
        return [f"control {c.name!r} was not caught: {c.detail}" for c in findings.controls if not c.caught]
    if not findings.comparisons:
        return ["nothing was compared"]
    repeated = [name for name, count in Counter(c.name for c in findings.comparisons).items() if count > 1]
    if repeated:
        return [f"comparison {repeated[0]!r} was handed in more than once"]
    if cell.expect == "equal":
        return [describe(c) for c in findings.comparisons if not c.equal]
    void = [describe(c) for c in findings.comparisons if c.problem or not c.elements]
    if not void and not any(c.mismatched_bytes for c in findings.comparisons):
        return ["a native arm shows zero mismatches: the detector is broken, or the arm is not native"]
    return void


def _kernels(cell: Cell, findings: Findings, declared: Mapping[str, Collection[str]]) -> list[str]:
    reasons = []
    ran = {(use.side, use.op) for use in findings.kernels}
    for side, op in cell.strict:
        if (side, op) not in ran:
            reasons.append(f"no read-back that {op} ran on the {side} side")
    for use in findings.kernels:
        where = f"{use.op} on the {use.side} side"
        if use.side in cell.native:
            reasons.append(f"{where} ran rlk kernel {use.kernel_id}, but this side must be native")
        elif use.backend not in BACKENDS_OF[cell.platform]:
            reasons.append(f"{where} ran on undeclared backend {use.backend!r}")
        elif use.op.split(".")[0] not in declared.get(use.kernel_id, ()):
            reasons.append(f"{where} reports kernel id {use.kernel_id!r}, which this source tree does not declare")
    return reasons


@dataclass(frozen=True)
class Session:
    """What the judge must know of the session besides the records.

    selected: ids that were to run, None for all (``--cell`` and ``--shard`` narrow it, and no narrowed session can PASS).
    trouble: session-level faults (dirty tree, unknown SHA, collection error, unknown or duplicate id, crash); any of them fails it.
    development: a dirty tree was let in on request; such a session cannot PASS either.
    """

    platform: Platform
    selected: frozenset[str] | None
    trouble: tuple[str, ...]
    development: bool = False


def complete(cells: Iterable[Cell], records: Iterable[CellRecord], session: Session) -> list[CellRecord]:
    """Records of all selected required cells in matrix order; a cell without a record, or with two, is put in words here."""
    by_id: dict[str, list[CellRecord]] = {}
    for record in records:
        by_id.setdefault(record.cell_id, []).append(record)
    result = []
    for cell in cells:
        if not cell.required or (session.selected is not None and cell.cell_id not in session.selected):
            continue
        found = by_id.get(cell.cell_id, [])
        if not found:
            result.append(CellRecord(cell_id=cell.cell_id, status=Status.MISSING, reasons=("no result: the cell did not run to its end",)))
        elif len(found) > 1:
            result.append(CellRecord(cell_id=cell.cell_id, status=Status.FAIL, reasons=(f"{len(found)} results for one cell",)))
        else:
            result.append(found[0])
    return result


def judge_session(cells: Sequence[Cell], records: Sequence[CellRecord], session: Session) -> Verdict:
    """The session's verdict over :func:`complete` records. PASS needs all required cells green, nothing narrowed and no trouble."""
    required = [c for c in cells if c.required]
    by_status = Counter(r.status for r in records)
    reasons = list(session.trouble)
    known = {c.cell_id for c in required}
    reasons += [f"record of a cell that is not in the matrix: {r.cell_id}" for r in records if r.cell_id not in known]
    if not required:
        reasons.append(f"platform {session.platform} has no required cell")
    for status in (Status.FAIL, Status.MISSING):
        red = [r.cell_id for r in records if r.status is status]
        if red:
            reasons.append(f"{len(red)} required cells {status}: {', '.join(red[:3])}{', …' if len(red) > 3 else ''}")
    if by_status[Status.FAIL] or (reasons and not by_status[Status.MISSING]):
        status = Status.FAIL
    elif by_status[Status.MISSING]:
        status = Status.MISSING
    else:
        status = Status.PASS if session.selected is None and not session.development else Status.PARTIAL
    return Verdict(
        status=status,
        platform=session.platform,
        reasons=tuple(reasons),
        required=len(required),
        passed=by_status[Status.PASS],
        failed=by_status[Status.FAIL],
        missing=by_status[Status.MISSING],
        not_selected=len(required) - len(records),
        unsupported=len(cells) - len(required),
    )
