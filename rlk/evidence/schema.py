"""Records of evidence, schema version 2. Each model refuses unknown fields and a status that its own evidence does not carry.

Version 1 had no digests; its reports are still read.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from rlk.evidence.provenance import Provenance

SCHEMA_VERSION: Literal[2] = 2

Count = Annotated[int, Field(ge=0)]
PlatformName = Literal["cpu", "cuda", "rocm"]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Milliseconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Digest = Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")]


class Status(StrEnum):
    """How a cell or a session ended. PARTIAL belongs to sessions that ran a part of the matrix on purpose."""

    PASS = "PASS"
    FAIL = "FAIL"
    MISSING = "MISSING"
    PARTIAL = "PARTIAL"


class Record(BaseModel):
    """Base of every record: immutable, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Difference(Record):
    """First differing element: its coordinate, both raw values in hex (big-endian, as one reads a number), distance in ULP."""

    index: tuple[int, ...]
    actual_hex: str
    expected_hex: str
    ulp: int | None


class Comparison(Record):
    """Outcome of one byte comparison. ``problem`` names what made it impossible or void (shape, dtype, no element, NaN or Inf).

    Either every element of ``shape`` was compared or there is a problem; a mismatch has a first difference, and nothing else has one.
    digest: of the value that both sides hold (``rlk.evidence.bytes.digest``), "" where they hold two or there is a problem.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: Count
    mismatched_elements: Count
    mismatched_bytes: Count
    max_ulp: int | None = None
    first: Difference | None = None
    problem: str = ""
    digest: Digest = ""

    @model_validator(mode="after")
    def _is_consistent(self) -> Comparison:
        compared = math.prod(self.shape)
        if not self.problem and (not compared or self.elements != compared):
            raise ValueError(f"{self.name}: {self.elements} of {compared} elements compared and no problem named")
        if self.mismatched_elements > self.elements or self.mismatched_bytes > 16 * self.mismatched_elements:
            raise ValueError(f"{self.name}: more mismatches than elements")
        if not (bool(self.mismatched_elements) == bool(self.mismatched_bytes) == (self.first is not None)):
            raise ValueError(f"{self.name}: mismatched elements, mismatched bytes and the first difference contradict each other")
        if self.digest and not self.equal:
            raise ValueError(f"{self.name}: one digest for a comparison that is not equal")
        return self

    @property
    def equal(self) -> bool:
        """True only if something was compared, nothing differs and nothing was wrong with the inputs."""
        return self.elements > 0 and not self.mismatched_bytes and not self.mismatched_elements and not self.problem


class Accuracy(Record):
    """How far one output or gradient of an operator lies from the fp32 reference, and how far it may.

    name: what was measured, beginning with ``subject.``; subject, value: operator and its output or gradient. max_abs, max_rel: largest
    error, absolute and relative to a nonzero reference. worst_excess: largest of error − (atol + rtol·|reference|); positive fails.
    reference_bf16_error: error that rounding the reference to bf16 makes by itself. problem: what made the measurement void.
    digest: of the measured value (``rlk.evidence.bytes.digest``), "" where there is a problem.
    """

    name: str
    subject: str
    value: str
    dtype: str
    shape: tuple[int, ...]
    atol: Finite
    rtol: Finite
    elements: Count = 0
    max_abs: Finite = 0.0
    max_rel: Finite = 0.0
    worst_excess: Finite = 0.0
    reference_bf16_error: Finite = 0.0
    problem: str = ""
    digest: Digest = ""

    @model_validator(mode="after")
    def _is_consistent(self) -> Accuracy:
        measured = math.prod(self.shape)
        if not self.problem and (not measured or self.elements != measured):
            raise ValueError(f"{self.name}: {self.elements} of {measured} elements measured and no problem named")
        return self

    @property
    def passed(self) -> bool:
        """True only if something was measured, no element lies outside the tolerance and nothing was wrong with the inputs."""
        return self.elements > 0 and self.worst_excess <= 0 and not self.problem


class KernelUse(Record):
    """What a worker says it ran: side ("train", "rollout", …), operator, backend, kernel id with its source hash, number of calls."""

    side: str
    op: str
    backend: str
    kernel_id: str
    calls: Annotated[int, Field(gt=0)]


class Control(Record):
    """A fault planted on purpose and whether the check it aims at caught it; ``detail`` is what the check said."""

    name: str
    caught: bool
    detail: str


class CellRecord(Record):
    """Everything one cell leaves behind. A PASS carries evidence and no reason; anything else carries a reason and no timing."""

    cell_id: str
    status: Status
    reasons: tuple[str, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    accuracies: tuple[Accuracy, ...] = ()
    kernels: tuple[KernelUse, ...] = ()
    controls: tuple[Control, ...] = ()
    facts: dict[str, JsonValue] = Field(default_factory=dict)
    timings_ms: dict[str, tuple[Milliseconds, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _status_fits_evidence(self) -> CellRecord:
        if self.status is Status.PASS:
            if self.reasons:
                raise ValueError(f"{self.cell_id}: PASS with reasons {self.reasons}")
            if not (self.comparisons or self.accuracies or self.controls):
                raise ValueError(f"{self.cell_id}: PASS without evidence")
        else:
            if not self.reasons:
                raise ValueError(f"{self.cell_id}: {self.status} without a reason")
            if self.timings_ms:
                raise ValueError(f"{self.cell_id}: {self.status} must not carry a timing")
        return self

    @property
    def elements(self) -> int:
        """Elements compared in this cell."""
        return sum(c.elements for c in self.comparisons)

    @property
    def mismatched_bytes(self) -> int:
        """Bytes that differ in this cell."""
        return sum(c.mismatched_bytes for c in self.comparisons)


class Waiver(Record):
    """A known red cell. It annotates the report and changes neither verdict nor exit code."""

    cell_id: str
    sha: str
    reason: str
    expires: str
    note: str = ""


class MatrixRow(Record):
    """One cell of the matrix as the report lists it, with all that the judge asks of it."""

    cell_id: str
    platform: PlatformName
    scope: str
    subject: str
    workload: str
    judgment: str
    expect: Literal["equal", "different", "reported", "caught", "close"]
    strict: tuple[tuple[str, str], ...] = ()
    native: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    backend: str = ""
    unsupported: str = ""


class SessionFacts(Record):
    """What the verdict must know of the session besides the records.

    selected: ids that were to run, None for all (``--cell``, ``--shard`` and ``--scope`` narrow it, and no narrowed session can PASS).
    scopes: the scopes that ``--scope`` narrowed the session to.
    trouble: session-level faults (dirty tree, unknown commit, collection error, crash); any of them fails the session.
    development: a dirty tree was let in on request; such a session cannot PASS either.
    """

    platform: PlatformName
    selected: tuple[str, ...] | None = None
    scopes: tuple[str, ...] = ()
    trouble: tuple[str, ...] = ()
    development: bool = False


class Verdict(Record):
    """Outcome of a session. Counts add up: required = passed + failed + missing + not_selected.

    green_scopes: for a session narrowed by ``--scope``, those scopes if all of their required cells passed; it is PARTIAL all the same.
    """

    status: Status
    platform: str
    green_scopes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    required: Count
    passed: Count
    failed: Count
    missing: Count
    not_selected: Count
    unsupported: Count

    @model_validator(mode="after")
    def _adds_up(self) -> Verdict:
        if self.required != self.passed + self.failed + self.missing + self.not_selected:
            raise ValueError(f"coverage does not add up: {self}")
        if self.status is Status.PASS and (self.reasons or not self.required or self.passed != self.required):
            raise ValueError(f"PASS needs every required cell green and no reason: {self}")
        return self


class Report(Record):
    """``report.json``: the verdict and all it rests on."""

    schema_version: Literal[1, 2] = SCHEMA_VERSION
    run_id: str
    command: str
    started_at: str
    finished_at: str
    matrix_source: str
    session: SessionFacts
    verdict: Verdict
    provenance: Provenance
    environment: dict[str, JsonValue]
    declared_kernels: dict[str, tuple[str, ...]]
    matrix: tuple[MatrixRow, ...]
    records: tuple[CellRecord, ...]
    waivers: tuple[Waiver, ...] = ()

    @model_validator(mode="after")
    def _has_digests(self) -> Report:
        for record in self.records if self.schema_version > 1 else ():
            undigested = [c.name for c in record.comparisons if c.equal and not c.digest]
            undigested += [a.name for a in record.accuracies if a.passed and not a.digest]
            if undigested:
                raise ValueError(f"{record.cell_id}: {undigested[0]} has no digest")
        return self
