"""The kept summaries of the cells on a card: one run, whose cells are green, wait for published weights or were red for a named fault of
the harness, and what else was kept of it."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from rlk.acceptance.judge import BACKENDS_OF
from rlk.acceptance.matrix import CROSS, RANK_FACTS, SNAPSHOT_WORKLOAD, enumerate_cells, several_cards
from rlk.acceptance.validate import KERNEL_ID
from rlk.contract.judgments import OPERATORS

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
SCOPES = {"ws1": ("ws1",), "ws2": ("ws2",), "engines": ("chain", "integration", "ablation", "control")}
REQUIRED = {cell.cell_id: cell for cell in enumerate_cells("cuda") if cell.required}
REFUSED = {cell_id for cell_id, cell in REQUIRED.items() if cell.subject == f"{CROSS}_nccl"}
"""Cells whose run the kept run refused, for the name of its directory: they have not come to their end on a card."""
MENDED = {cell_id for cell_id, cell in REQUIRED.items() if cell.subject == "stale_weight_version"}
"""A control that the kept run did not catch, because it hooked into a call that the loop no longer made; caught in a later run."""
AGAIN = "engines_again"
"""A later run of some of the engines' cells, after what was at fault in the harness, of the same kernels."""
DIGEST = re.compile(r"[0-9a-f]{64}")
PLACES = {"run_id", "date", "command", "commit", "dirty", "tree_digest", "card", "driver", "cuda", "packages"}
OUTCOMES = {"required", "green", "red", "missing", "elements_compared", "several_cards", "kernels", "vendor", "trouble", "files"}
SHARED = ("run_id", "commit", "tree_digest", "packages", "card", "driver", "files", "trouble")


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}_h200.json").read_text())
    return found


@pytest.mark.parametrize("name", SCOPES)
def test_it_says_where_and_on_which_sources(name: str) -> None:
    summary = read(name)
    assert set(summary) == PLACES | OUTCOMES
    assert summary["dirty"] is False
    assert summary["trouble"] == []
    assert re.fullmatch(r"[0-9a-f]{40}", summary["commit"])
    assert DIGEST.fullmatch(summary["tree_digest"])
    assert date.fromisoformat(summary["date"])
    assert "H200" in summary["card"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", summary["driver"])
    assert {"torch", "triton", "pytest", "pydantic", "vllm", "megatron-core", "ray"} <= set(summary["packages"])
    assert re.search(r"-m cuda acceptance/ --(scope ws1|cell)\b", summary["command"])
    assert "--allow-dirty" not in summary["command"]
    assert all(DIGEST.fullmatch(digest) for digest in summary["files"].values())
    assert {"cells.jsonl", "environment.json", "report.json"} <= set(summary["files"])


def test_the_summaries_are_of_one_joined_run() -> None:
    ours, *others = ({key: summary[key] for key in SHARED} for summary in map(read, SCOPES))
    assert all(other == ours for other in others)


@pytest.mark.parametrize("name", SCOPES)
def test_every_required_cell_is_green_or_waits_for_published_weights(name: str) -> None:
    summary, required = read(name), {cell_id for cell_id, cell in REQUIRED.items() if cell.scope in SCOPES[name]}
    waiting = {cell_id for cell_id in required if SNAPSHOT_WORKLOAD in cell_id}
    faults = (REFUSED | MENDED) & required
    assert set(summary["red"]) == faults
    assert set(summary["missing"]) == waiting
    assert set(summary["green"]) == required - waiting - faults
    assert len(summary["green"]) + len(summary["missing"]) + len(faults) == summary["required"] == len(required)
    assert summary["elements_compared"] > 0


def test_what_was_red_for_a_fault_of_the_harness_was_judged_again_with_the_same_kernels() -> None:
    kept, again = read("engines"), read(AGAIN)
    assert set(again) == set(kept)
    assert again["commit"] != kept["commit"]
    assert (again["dirty"], again["trouble"], again["red"], again["missing"]) == (False, [], {}, [])
    assert set(again["kernels"]) <= set(kept["kernels"])
    assert set(again["green"]) >= MENDED
    assert len(again["green"]) == again["required"]
    for cell_id in REFUSED:
        assert "PlanError" in kept["red"][cell_id]


@pytest.mark.parametrize("name", SCOPES)
def test_cells_of_several_cards_say_which_ranks_there_were_and_how_their_parts_were_joined(name: str) -> None:
    summary = read(name)
    assert set(summary["several_cards"]) == {cell_id for cell_id in summary["green"] if several_cards(REQUIRED[cell_id])}
    for facts in summary["several_cards"].values():
        assert set(facts) == set(RANK_FACTS)
        assert {"cuda:0", "cuda:1"} <= set(re.findall(r"cuda:\d", str(facts["communication"])))
        assert "(r0+r1)" in facts["reduction_order"].values()


def test_two_cards_were_joined_over_nccl_and_over_peer_memory() -> None:
    carried = str([facts["communication"] for name in SCOPES for facts in read(name)["several_cards"].values()])
    assert all(transport in carried for transport in ("nccl", "peer"))


def _backend(kernel_id: str) -> str:
    """CUDA C++ kernels stand in the table of the backend "triton"."""
    return {"cuda": "triton"}.get(kind := kernel_id.split(":")[0], kind)


@pytest.mark.parametrize("name", SCOPES)
def test_kernels_are_well_formed_and_cover_the_green_cells(name: str) -> None:
    summary, names = read(name), {op.name for op in OPERATORS}
    for kernel_id, operators in summary["kernels"].items():
        assert KERNEL_ID.fullmatch(kernel_id)
        assert _backend(kernel_id) in BACKENDS_OF["cuda"] or operators == ["rope.table"]  # which is built on the CPU, once
        assert operators == sorted(set(operators))
        assert name != "ws1" or {op.split(".")[0] for op in operators} <= names
    ran = {(_backend(kernel_id), op) for kernel_id, operators in summary["kernels"].items() for op in operators}
    for cell_id in summary["green"]:
        cell = REQUIRED[cell_id]
        assert {(cell.backend or "triton", op) for _, op in cell.strict} <= ran, cell_id


def test_the_certificates_are_of_this_card_and_cover_the_vendors_cells() -> None:
    summary = read("ws1")
    assert set(summary["vendor"]) == {REQUIRED[cell_id].subject for cell_id in summary["green"] if "-vendor/" in cell_id} - {"lm_head"}
    assert all(summary["vendor"].values())
    for operator, vendor in ((operator, one) for operator, several in summary["vendor"].items() for one in several):
        assert vendor["certified"] > 0
        assert (vendor["card"], vendor["driver"]) == (summary["card"], summary["driver"])
        assert {vendor["vendor"], *filter(None, [vendor.get("chain")])} <= set(summary["kernels"]), operator
        assert re.fullmatch(r"cuBLASLt \d{6}|FlashAttention 3 of vLLM [\d.]+", vendor["library"])


def test_planted_operators_were_caught_by_their_own_cells() -> None:
    record = read("planted")
    assert record["commit"] == read(AGAIN)["commit"]
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
    record = read("repetitions")
    assert record["commit"] == read("ws1")["commit"]
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
    record = read("memory")
    assert record["commit"] == read("ws1")["commit"]
    assert "H200" in record["card"]
    assert set(record["checks"]) == set(PLANTED)
    failed, parts = [], set()
    for check, held in record["checks"].items():
        unclean = {part for part, found in held.items() if found["errors"] != 0 or not found["ended"]}
        assert PLANTED[check] <= unclean
        failed += [f"{check}: {part}" for part in unclean - PLANTED[check]]
        parts.add(frozenset(held) - PLANTED[check])
    assert record["failed"] == failed == []
    assert len(parts) == 1
    assert len(*parts) > 2 * len(OPERATORS)
    own = {each for name in SCOPES for each in read(name)["kernels"] if each.startswith(("cuda:", "triton:"))}
    assert all(own <= set(ran) for ran in record["kernels"].values())
