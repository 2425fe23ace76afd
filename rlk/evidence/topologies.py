"""The table of topologies: what each was compared in, how many elements differed, and what its ranks sent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pydantic import JsonValue

from rlk.evidence.schema import CellRecord, MatrixRow


@dataclass
class TopologyRow:
    """One topology under one workload. judgments: name -> (elements that differ, elements compared).

    tokens: compared in logprob. calls, bytes_sent: of the busiest rank in one update. layer: axis -> bytes that a rank sends for one layer,
    (ours, the engine's own).
    """

    name: str
    workload: str
    tokens: int = 0
    judgments: dict[str, tuple[int, int]] = field(default_factory=dict)
    calls: int = 0
    bytes_sent: int = 0
    layer: dict[str, tuple[int, int]] = field(default_factory=dict)


def topology_rows(pairs: Iterable[tuple[MatrixRow, CellRecord]]) -> list[TopologyRow]:
    """Rows in matrix order from the cells that carry the fact ``topology``; cells of one topology and workload share a row."""
    rows: dict[tuple[str, str], TopologyRow] = {}
    for cell, record in pairs:
        if "topology" not in record.facts:
            continue
        row = rows.setdefault((cell.subject, cell.workload), TopologyRow(cell.subject, cell.workload))
        differ = sum(c.mismatched_elements for c in record.comparisons)
        row.judgments[cell.judgment] = (differ, sum(c.elements for c in record.comparisons))
        row.tokens = max(row.tokens, _number(record.facts.get("tokens_compared")))
        for rank in _list(record.facts.get("traffic_per_update")):
            if isinstance(rank, dict):
                row.calls = max(row.calls, _number(rank.get("calls")))
                row.bytes_sent = max(row.bytes_sent, _number(rank.get("bytes_sent")))
        layers = record.facts.get("layer_bytes")
        for axis, sent in layers.items() if isinstance(layers, dict) else ():
            if isinstance(sent, dict):
                row.layer[axis] = (_number(sent.get("rlk")), _number(sent.get("megatron")))
    return list(rows.values())


def judgments(rows: Sequence[TopologyRow]) -> list[str]:
    """Judgments of the table's columns, in the order in which cells first have them."""
    return list(dict.fromkeys(name for row in rows for name in row.judgments))


def _number(value: JsonValue) -> int:
    return value if isinstance(value, int) else 0


def _list(value: JsonValue) -> list[JsonValue]:
    return value if isinstance(value, list) else []
