"""Records of evidence, schema version 1. Each model refuses unknown fields and a status that its own evidence does not carry."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

SCHEMA_VERSION = 1

Count = Annotated[int, Field(ge=0)]


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
    """Outcome of one byte comparison. ``problem`` names what made it impossible or void (shape, dtype, no element, NaN or Inf)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    elements: Count
    mismatched_elements: Count
    mismatched_bytes: Count
    max_ulp: int | None = None
    first: Difference | None = None
    problem: str = ""

    @property
    def equal(self) -> bool:
        """True only if something was compared, nothing differs and nothing was wrong with the inputs."""
        return self.elements > 0 and not self.mismatched_bytes and not self.mismatched_elements and not self.problem


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
    kernels: tuple[KernelUse, ...] = ()
    controls: tuple[Control, ...] = ()
    facts: dict[str, JsonValue] = Field(default_factory=dict)
    timings_ms: dict[str, tuple[float, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _status_fits_evidence(self) -> CellRecord:
        if self.status is Status.PASS:
            if self.reasons:
                raise ValueError(f"{self.cell_id}: PASS with reasons {self.reasons}")
            if not self.comparisons and not self.controls:
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
    """One cell of the matrix as the report lists it."""

    cell_id: str
    scope: str
    subject: str
    workload: str
    judgment: str
    expect: str
    unsupported: str = ""


class Verdict(Record):
    """Outcome of a session. Counts add up: required = passed + failed + missing + not_selected."""

    status: Status
    platform: str
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

    schema_version: int = SCHEMA_VERSION
    run_id: str
    command: str
    started_at: str
    finished_at: str
    matrix_source: str
    verdict: Verdict
    provenance: dict[str, JsonValue]
    environment: dict[str, JsonValue]
    matrix: tuple[MatrixRow, ...]
    records: tuple[CellRecord, ...]
    waivers: tuple[Waiver, ...] = ()
