"""The topology cells and their table in the report."""

from __future__ import annotations

import torch

from rlk.acceptance.ws2 import FAULTS, LAYOUTS, TOPOLOGIES, parameter_names, subject, topology, ws2_cells
from rlk.contract.models import TINY
from rlk.contract.numerics import DEFAULT
from rlk.contract.topology import Topology
from rlk.evidence.bytes import compare
from rlk.evidence.schema import CellRecord, Status
from rlk.evidence.topologies import judgments, topology_rows
from rlk.loop.prepare import tiny_config
from rlk.model.layout import packed_shapes


def test_every_topology_is_judged_in_every_layout() -> None:
    cells = list(ws2_cells("cpu"))
    assert len({cell.cell_id for cell in cells}) == len(cells) == len(TOPOLOGIES) * (len(LAYOUTS["cpu"]) * 5 + 1) + len(FAULTS)
    assert all(Topology(*pair).train_ranks <= 8 and topology(subject(*pair)) == (*pair, "") for pair in TOPOLOGIES)
    gradients = [cell for cell in cells if cell.judgment == "gradients"]
    for cell in gradients:
        for name in packed_shapes(tiny_config(), DEFAULT):
            assert f"update 3: {name}" in cell.names
    assert parameter_names(TINY) == tuple(packed_shapes(tiny_config(), DEFAULT))


def test_the_table_counts_what_differs_and_what_was_sent() -> None:
    cells = [cell for cell in ws2_cells("cpu") if cell.subject == "tp2cp4" and cell.workload == "tiny-packed"][:2]
    facts = {
        "topology": {"tp": 2, "cp": 4},
        "tokens_compared": 106,
        "traffic_per_update": [{"calls": 3, "bytes_sent": 10}, {"calls": 4, "bytes_sent": 9}],
        "layer_bytes": {"tp": {"rlk": 6, "megatron": 4}, "cp": {"rlk": 2, "megatron": 3}},
    }
    expected, actual = torch.arange(5.0) + 1, torch.arange(5.0) + 1
    actual[3] = 7.0
    held = [compare("equal", expected.clone(), expected), compare("one off", actual, expected)]
    pairs = [
        (cell.row(), CellRecord(cell_id=cell.cell_id, status=Status.FAIL, reasons=("planted",), comparisons=(found,), facts=facts))
        for cell, found in zip(cells, held)
    ]
    control = CellRecord(cell_id="cpu/ws2/ring_order/tiny-packed/caught", status=Status.MISSING, reasons=("none",))
    (row,) = topology_rows([*pairs, (pairs[0][0], control)])
    assert (row.name, row.workload, row.tokens, row.calls, row.bytes_sent) == ("tp2cp4", "tiny-packed", 106, 4, 10)
    assert row.judgments == {"logprob": (0, 5), "loss": (1, 5)}
    assert row.layer == {"tp": (6, 4), "cp": (2, 3)}
    assert judgments([row]) == ["logprob", "loss"]
    assert topology_rows([]) == []
