"""A cell: one row of the acceptance matrix, named by what it checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlk.evidence.schema import MatrixRow

Platform = Literal["cpu", "cuda", "rocm"]
Scope = Literal["ws1", "ws2", "chain", "integration", "ablation", "control", "performance"]
Expect = Literal["equal", "different", "caught"]
PLATFORMS: tuple[Platform, ...] = ("cpu", "cuda", "rocm")


@dataclass(frozen=True)
class Cell:
    """One row of the matrix.

    expect: "equal" (zero mismatched bytes), "different" (a native arm must report mismatches), "caught" (a planted fault must be caught).
    strict: (side, operator) pairs that must have run on this platform's rlk backend, as the worker itself reports.
    native: sides on which no rlk operator may have run. facts: facts that must be recorded. unsupported: the reason, "" if required.
    """

    platform: Platform
    scope: Scope
    subject: str
    workload: str
    judgment: str
    expect: Expect = "equal"
    strict: tuple[tuple[str, str], ...] = ()
    native: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    unsupported: str = ""

    @property
    def cell_id(self) -> str:
        """Stable name, ``platform/scope/subject/workload/judgment``."""
        return "/".join((self.platform, self.scope, self.subject, self.workload, self.judgment))

    @property
    def required(self) -> bool:
        """False only for a cell that is listed as unsupported."""
        return not self.unsupported

    def row(self) -> MatrixRow:
        """The cell as the report lists it."""
        return MatrixRow(
            cell_id=self.cell_id,
            scope=self.scope,
            subject=self.subject,
            workload=self.workload,
            judgment=self.judgment,
            expect=self.expect,
            unsupported=self.unsupported,
        )
