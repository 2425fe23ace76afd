"""How many collectives ran and how many bytes they sent."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class Row:
    """One kind of collective on one group. bytes_sent: payload that this rank sends to others, not counting any relay by the transport."""

    group: str
    op: str
    calls: int = 0
    bytes_sent: int = 0


class Traffic:
    """Counts of this rank since the last :meth:`reset`."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], Row] = {}

    def add(self, group: str, op: str, bytes_sent: int) -> None:
        """One transport call of collective ``op`` on ``group``."""
        row = self._rows.setdefault((group, op), Row(group, op))
        row.calls += 1
        row.bytes_sent += bytes_sent

    def rows(self) -> list[dict[str, Any]]:
        """Plain values, sorted by group and collective."""
        return [asdict(self._rows[key]) for key in sorted(self._rows)]

    def reset(self) -> None:
        """Forget what was counted."""
        self._rows.clear()
