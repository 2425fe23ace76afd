"""A cell: one row of the acceptance matrix, named by what it checks."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from rlk.acceptance.platforms import PLATFORMS, Platform
from rlk.evidence.schema import MatrixRow

__all__ = ["PLATFORMS", "Cell", "Expect", "Platform", "Scope"]

Scope = Literal["ws1", "ws2", "chain", "integration", "ablation", "control", "performance"]
Expect = Literal["equal", "different", "reported", "caught", "close"]


@dataclass(frozen=True)
class Cell:
    """One row of the matrix.

    expect: "equal" (zero mismatched bytes), "different" (a native arm must report mismatches), "reported" (a mixed arm, any number of
    them), "caught" (a planted fault must be caught), "close" (within the contract's tolerance of the fp32 reference).
    strict: (side, operator) pairs that must have run on this platform's rlk backend, as the worker itself reports.
    native: sides on which no rlk operator may have run. A side is an engine, "train" or "rollout", or a route of one, "train.ffn"; of an
    engine that reports its routes, its own name stands for what ran outside of them. facts: facts that must be recorded. names: comparisons
    or accuracies that must be handed in. backend: the one backend that may have run, "" for any of the platform. unsupported: the reason,
    "" if required.
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
    names: tuple[str, ...] = ()
    backend: str = ""
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
        return MatrixRow(cell_id=self.cell_id, **asdict(self))

    @classmethod
    def from_row(cls, row: MatrixRow) -> Cell:
        """Inverse of :meth:`row`; raises ValueError if the row's id is not the one its fields give."""
        cell = cls(**row.model_dump(exclude={"cell_id"}))
        if cell.cell_id != row.cell_id:
            raise ValueError(f"matrix row {row.cell_id!r} describes {cell.cell_id!r}")
        return cell
