"""The verdict: pure functions from evidence to a cell's status, and from all records to the session's. Nothing here can be configured."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from rlk.acceptance.cell import Cell, Platform
from rlk.contract.judgments import JUDGMENTS, OPERATORS, Tolerance, tolerance
from rlk.evidence.accuracy import describe_accuracy
from rlk.evidence.bytes import describe
from rlk.evidence.schema import Accuracy, CellRecord, Comparison, Control, KernelUse, SessionFacts, Status, Verdict

BACKENDS_OF: Mapping[Platform, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton", "vendor"), "rocm": ("triton", "vendor")}
HOST_OPERATORS = ("rope.table",)
"""What the contract computes once on the CPU, whatever the engines compute on; its hash is compared."""
_EXIT_CODE = {Status.PASS: 0, Status.FAIL: 1, Status.MISSING: 1, Status.PARTIAL: 3}


@dataclass
class Findings:
    """What a cell's test handed in."""

    comparisons: list[Comparison] = field(default_factory=list)
    accuracies: list[Accuracy] = field(default_factory=list)
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
    if not trouble or findings != Findings():  # a test that broke before it handed anything in is told why, not all that is absent
        reasons += _expectation(cell, findings)
        reasons += [f"control {c.name!r} was not caught: {c.detail}" for c in findings.controls if not c.caught]
        reasons += _kernels(cell, findings, declared)
        reasons += _facts(cell, findings)
    return CellRecord(
        cell_id=cell.cell_id,
        status=Status.FAIL if reasons else Status.PASS,
        reasons=tuple(reasons),
        comparisons=tuple(findings.comparisons),
        accuracies=tuple(findings.accuracies),
        kernels=tuple(findings.kernels),
        controls=tuple(findings.controls),
        facts=findings.facts,
        timings_ms={} if reasons else findings.timings_ms,
    )


def rejudge(cell: Cell, record: CellRecord, declared: Mapping[str, Collection[str]]) -> list[str]:
    """Why a record's own evidence does not carry its PASS; empty for one that it carries, and for a record that is red anyway."""
    if record.status is not Status.PASS:
        return []
    findings = Findings(list(record.comparisons), list(record.accuracies), list(record.kernels), list(record.controls), record.facts)
    return list(judge_cell(cell, findings, [], declared).reasons)


def _expectation(cell: Cell, findings: Findings) -> list[str]:
    if cell.expect == "caught":
        planted = {c.name for c in findings.controls}
        return [] if cell.subject in planted else [f"control {cell.subject!r} was not run"]
    handed_in: Sequence[Comparison | Accuracy] = findings.accuracies if cell.expect == "close" else findings.comparisons
    if not handed_in:
        return ["nothing was measured" if cell.expect == "close" else "nothing was compared"]
    names = Counter(c.name for c in handed_in)
    repeated = [name for name, count in names.items() if count > 1]
    if repeated:
        return [f"comparison {repeated[0]!r} was handed in more than once"]
    absent = [name for name in cell.names if name not in names]
    if absent:
        return [f"{len(absent)} of {len(cell.names)} results were not handed in, first {absent[0]!r}"]
    if cell.expect == "close":
        return [reason for a in findings.accuracies for reason in _accuracy(cell, a)]
    if cell.expect == "equal":
        return [describe(c) for c in findings.comparisons if not c.equal]
    void = [describe(c) for c in findings.comparisons if c.problem]
    if cell.expect == "different" and not void and not any(c.mismatched_bytes for c in findings.comparisons):
        return ["a native arm shows zero mismatches: the detector is broken, or the arm is not native"]
    return void


def _accuracy(cell: Cell, accuracy: Accuracy) -> list[str]:
    allowed = _contract_tolerance(cell, accuracy)
    if allowed is None:
        return [f"{accuracy.name}: the contract has no tolerance for {accuracy.value} of {accuracy.subject} in {cell.judgment}"]
    if (accuracy.atol, accuracy.rtol) != (allowed.atol, allowed.rtol):
        return [
            f"{accuracy.name}: judged within {accuracy.atol:g}, {accuracy.rtol:g}; the contract allows {allowed.atol:g}, {allowed.rtol:g}"
        ]
    return [] if accuracy.passed else [describe_accuracy(accuracy)]


def _contract_tolerance(cell: Cell, accuracy: Accuracy) -> Tolerance | None:
    """The contract's tolerance for what an accuracy names, None where it names nothing that this cell judges."""
    judgment = next((j for j in JUDGMENTS if j.name == cell.judgment and not j.exact), None)
    op = next((o for o in OPERATORS if o.name == accuracy.subject and accuracy.name.startswith(f"{o.name}.")), None)
    if judgment is None or op is None or accuracy.value not in (op.gradients if judgment.gradient else op.outputs):
        return None
    return tolerance(op.name, judgment, op.storage(accuracy.value))


def _kernels(cell: Cell, findings: Findings, declared: Mapping[str, Collection[str]]) -> list[str]:
    ran = {(use.side, use.op) for use in findings.kernels}
    reasons = [f"no read-back that {op} ran on the {side} side" for side, op in cell.strict if (side, op) not in ran]
    for use in findings.kernels:
        where = f"{use.op} on the {use.side} side"
        if use.side in cell.native:
            reasons.append(f"{where} ran rlk kernel {use.kernel_id}, but this side must be native")
        elif cell.backend and use.backend != cell.backend:
            reasons.append(f"{where} ran on backend {use.backend!r}, this cell judges {cell.backend!r}")
        elif use.backend not in (("cpu",) if use.op in HOST_OPERATORS else BACKENDS_OF[cell.platform]):
            reasons.append(f"{where} ran on undeclared backend {use.backend!r}")
        elif use.op.split(".")[0] not in declared.get(use.kernel_id, ()):
            reasons.append(f"{where} reports kernel id {use.kernel_id!r}, which this source tree does not declare")
    return reasons


def _facts(cell: Cell, findings: Findings) -> list[str]:
    reasons = [f"fact {name!r} is missing" for name in cell.facts if findings.facts.get(name) in (None, "", [], {})]
    for name, value in findings.facts.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            reasons.append(f"fact {name!r} is not plain JSON of finite numbers")
    return reasons


def conclude(cells: Sequence[Cell], handed_in: Iterable[CellRecord], session: SessionFacts) -> tuple[list[CellRecord], Verdict]:
    """One record for each selected required cell, in matrix order, and the verdict over them.

    handed_in: every record that arrived, in any order. A cell without one, or with two, is put in words here; a record of a cell that
    is not to run is a fault of the session. PASS needs all required cells green, nothing narrowed and no trouble.
    """
    by_id: dict[str, list[CellRecord]] = {}
    for record in handed_in:
        by_id.setdefault(record.cell_id, []).append(record)
    required = [c for c in cells if c.required]
    to_run = [c.cell_id for c in required if session.selected is None or c.cell_id in session.selected]
    records = [_only(cell_id, by_id.get(cell_id, [])) for cell_id in to_run]
    reasons = [*session.trouble, *_matrix_faults(cells, session)]
    reasons += [f"result of a cell that is not to run here: {cell_id}" for cell_id in by_id if cell_id not in set(to_run)]
    return records, _verdict(cells, required, records, reasons, session)


def _only(cell_id: str, found: list[CellRecord]) -> CellRecord:
    if not found:
        return CellRecord(cell_id=cell_id, status=Status.MISSING, reasons=("no result: the cell did not run to its end",))
    if len(found) == 1:
        return found[0]
    reasons = [f"{len(found)} results for one cell", *(reason for record in found for reason in record.reasons)]
    return CellRecord(cell_id=cell_id, status=Status.FAIL, reasons=tuple(reasons))


def _matrix_faults(cells: Sequence[Cell], session: SessionFacts) -> list[str]:
    faults = [f"the matrix lists {cell_id} {n} times" for cell_id, n in Counter(c.cell_id for c in cells).items() if n > 1]
    faults += [f"the matrix of {session.platform} lists {c.cell_id}" for c in cells if c.platform != session.platform]
    if not any(c.required for c in cells):
        faults.append(f"platform {session.platform} has no required cell")
    return faults


def _verdict(
    cells: Sequence[Cell], required: Sequence[Cell], records: Sequence[CellRecord], faults: list[str], session: SessionFacts
) -> Verdict:
    by_status = Counter(r.status for r in records)
    if by_status[Status.FAIL] or faults:
        status = Status.FAIL
    elif by_status[Status.MISSING]:
        status = Status.MISSING
    else:
        status = Status.PASS if session.selected is None and not session.development else Status.PARTIAL
    return Verdict(
        status=status,
        platform=session.platform,
        green_scopes=_green_scopes(required, session, status),
        reasons=(*faults, *_red(records, Status.FAIL), *_red(records, Status.MISSING)),
        required=len(required),
        passed=by_status[Status.PASS],
        failed=by_status[Status.FAIL],
        missing=by_status[Status.MISSING],
        not_selected=len(required) - len(records),
        unsupported=len(cells) - len(required),
    )


def _green_scopes(required: Sequence[Cell], session: SessionFacts, status: Status) -> tuple[str, ...]:
    """The scopes of a ``--scope`` session, if every required cell of every one of them was to run and passed in a clean checkout."""
    if status is not Status.PARTIAL or session.development or session.selected is None:
        return ()
    whole = {c.cell_id for c in required if c.scope in session.scopes}
    return session.scopes if set(session.selected) == whole else ()


class Concluded(Protocol):
    """The verdict over one run, or over two."""

    @property
    def status(self) -> Status: ...
    @property
    def green_scopes(self) -> tuple[str, ...]: ...


def exit_code(verdict: Concluded) -> int:
    """0 PASS, or every required cell of the scopes that were asked for is green; 1 FAIL or MISSING; 3 any other PARTIAL."""
    return 0 if verdict.green_scopes else _EXIT_CODE[verdict.status]


def _red(records: Sequence[CellRecord], status: Status) -> list[str]:
    red = [r.cell_id for r in records if r.status is status]
    return [f"{len(red)} required cells {status}: {', '.join(red[:3])}{', …' if len(red) > 3 else ''}"] if red else []
