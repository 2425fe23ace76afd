"""The kept summary of the operator cells on a card: it adds up, names real cells and kernels, and claims no more than its sources can."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from rlk.acceptance.judge import BACKENDS_OF
from rlk.acceptance.validate import KERNEL_ID
from rlk.acceptance.ws1 import ws1_cells
from rlk.contract.judgments import OPERATORS

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
REQUIRED = {cell.cell_id: cell for cell in ws1_cells("cuda") if cell.required}
DIGEST = re.compile(r"[0-9a-f]{64}")
PLACES = {"run_id", "date", "command", "commit", "dirty", "tree_digest", "card", "driver", "cuda", "packages"}
OUTCOMES = {"required", "green", "red", "missing", "elements_compared", "kernels", "vendor", "trouble", "files"}


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "ws1_h200.json").read_text())
    return found


def test_it_says_where_and_on_which_sources(summary: dict[str, Any]) -> None:
    assert set(summary) == PLACES | OUTCOMES
    assert summary["dirty"] is False
    assert re.fullmatch(r"[0-9a-f]{40}", summary["commit"])
    assert DIGEST.fullmatch(summary["tree_digest"])
    assert date.fromisoformat(summary["date"])
    assert "H200" in summary["card"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", summary["driver"])
    assert {"torch", "triton", "pytest", "pydantic"} <= set(summary["packages"])
    assert re.search(r"-m cuda acceptance/ --scope ws1\b", summary["command"])
    assert "--allow-dirty" not in summary["command"]


def test_every_required_cell_is_green_red_or_missing_once(summary: dict[str, Any]) -> None:
    named = [*summary["green"], *summary["red"], *summary["missing"]]
    assert len(named) == len(set(named)) == summary["required"]
    assert set(named) == set(REQUIRED)
    assert all(isinstance(reason, str) and reason for reason in summary["red"].values())
    assert summary["elements_compared"] > 0


def _backend(kernel_id: str) -> str:
    """CUDA C++ kernels stand in the table of the backend "triton"."""
    return {"cuda": "triton"}.get(kind := kernel_id.split(":")[0], kind)


def test_kernels_are_well_formed_and_cover_the_green_cells(summary: dict[str, Any]) -> None:
    names = {op.name for op in OPERATORS}
    for kernel_id, operators in summary["kernels"].items():
        assert KERNEL_ID.fullmatch(kernel_id)
        assert _backend(kernel_id) in BACKENDS_OF["cuda"]
        assert operators == sorted(set(operators))
        assert {op.split(".")[0] for op in operators} <= names
    ran = {(_backend(kernel_id), op) for kernel_id, operators in summary["kernels"].items() for op in operators}
    for cell_id in summary["green"]:
        cell = REQUIRED[cell_id]
        assert {(cell.backend, op) for _, op in cell.strict} <= ran, cell_id


def test_digests_and_the_certificates_are_well_formed(summary: dict[str, Any]) -> None:
    assert {"cells.jsonl", "environment.json", "report.json"} <= set(summary["files"])
    assert all(DIGEST.fullmatch(digest) for digest in summary["files"].values())
    assert set(summary["vendor"]) == {REQUIRED[cell_id].subject for cell_id in summary["green"] if "-vendor/" in cell_id} - {"lm_head"}
    assert all(summary["vendor"].values())
    for operator, vendor in ((operator, one) for operator, several in summary["vendor"].items() for one in several):
        assert vendor["certified"] > 0
        assert (vendor["card"], vendor["driver"]) == (summary["card"], summary["driver"])
        assert {vendor["vendor"], *filter(None, [vendor.get("chain")])} <= set(summary["kernels"]), operator
        assert re.fullmatch(r"cuBLASLt \d{6}|FlashAttention 3 of vLLM [\d.]+", vendor["library"])


def test_planted_operators_were_caught_by_their_own_cells() -> None:
    record = json.loads((RESULTS / "planted_h200.json").read_text())
    assert "H200" in record["card"]
    faults = {name: found for name, found in record["checks"].items() if name.startswith("planted: ")}
    controls = {found["cell"] for name, found in record["checks"].items() if name not in faults and found["status"] == "PASS"}
    assert set(faults) == {"planted: default cuBLAS", "planted: tl.sum of a row", "planted: automatic splits"}
    for found in faults.values():
        assert found["ok"]
        assert found["cell"] in REQUIRED
        assert found["cell"] in controls
        assert found["status"] == "FAIL"
        assert found["differing"] > 0
        assert "elements differ" in found["reasons"][0]


def test_a_thousand_repetitions_gave_one_digest_and_graphs_the_same_bytes() -> None:
    record = json.loads((RESULTS / "repetitions_h200.json").read_text())
    assert "H200" in record["card"]
    assert {op.split(".")[0] for op in record["operators"]} == {op.name for op in OPERATORS}
    repeated = {name: found for name, found in record["checks"].items() if "repetitions" in found}
    assert len(repeated) >= len(OPERATORS)
    assert all(found["ok"] and found["repetitions"] >= 1000 for found in repeated.values())
    assert len({found["digest"] for found in repeated.values()}) == len(repeated)
    assert {"the host never waits", "a replayed graph gives the same bytes", "graph = eager"} <= set(record["checks"]) - set(repeated)
    assert all(found["ok"] for found in record["checks"].values())


PLANTED = {"end": {"past the end", "one past the end"}, "start": {"before the start"}, "memcheck": {"past the end"}, "racecheck": {"race"}}


def test_the_memory_checks_saw_the_planted_faults_and_covered_the_same_parts() -> None:
    record = json.loads((RESULTS / "memory_h200.json").read_text())
    assert "H200" in record["card"]
    assert set(record["checks"]) == set(PLANTED)
    failed, parts = [], set()
    for check, held in record["checks"].items():
        unclean = {part for part, found in held.items() if found["errors"] != 0 or not found["ended"]}
        assert PLANTED[check] <= unclean
        failed += [f"{check}: {part}" for part in unclean - PLANTED[check]]
        parts.add(frozenset(held) - PLANTED[check])
    assert record["failed"] == sorted(failed)
    assert len(parts) == 1
    assert len(*parts) > 2 * len(OPERATORS)
