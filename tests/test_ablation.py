"""The ablation's data and checks: modes and arms, kernels by route, what an arm must show, and the faults that it must see."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from acceptance import test_ablation as cells
from acceptance.engines import kernels_of
from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence
from rlk.acceptance.judge import Findings, judge_cell
from rlk.acceptance.matrix import enumerate_cells
from rlk.contract.arms import ARMS, MIXED_MODES, MODES, ROUTES, routes_of
from rlk.contract.numerics import DEFAULT
from rlk.evidence.bytes import compare
from rlk.evidence.schema import Comparison, Status
from rlk.kernels.registry import declared_kernels
from rlk.kernels.rms_norm import rms_norm
from rlk.model.routes import RouteLog, computes
from rlk.rollout.vllm.plugin import ARCHITECTURE, MIXED_ARCHITECTURE
from rlk.rollout.vllm.settings import WORKERS, EngineRefusal
from rlk.rollout.vllm.wanted import Wanted

Kernels = list[dict[str, Any]]


def cell_of(name: str) -> Cell:
    return next(cell for cell in enumerate_cells("cpu") if cell.scope == "ablation" and cell.subject == name)


def ran(*operators: str) -> Kernels:
    """A read-back of operators under kernel ids that these sources declare."""
    declared = declared_kernels()
    ids = {
        op: next(name for name, operators in declared.items() if op in operators and name.startswith("cpu:"))
        for op in operators_of(*operators)
    }
    return [{"op": op, "backend": "cpu", "kernel_id": ids[op.partition(".")[0]], "calls": 2} for op in operators]


def operators_of(*operators: str) -> list[str]:
    return [op.partition(".")[0] for op in operators]


def engine(cell: Cell, side: str, operators: dict[str, str]) -> dict[str, Any]:
    """The read-back of an engine that ran exactly what the cell asks for."""
    routes = {route: {"runs": 3, "kernels": ran(*(op for name, op in cell.strict if name == f"{side}.{route}"))} for route in ROUTES}
    if side == "train":
        routes["backward"] = {"runs": 3, "kernels": ran(*sorted({f"{op}.backward" for name, op in cell.strict if name.startswith(side)}))}
    total: dict[tuple[str, str], dict[str, Any]] = {}
    for what in routes.values():
        for kernel in what["kernels"]:
            found = total.setdefault((kernel["op"], kernel["kernel_id"]), {**kernel, "calls": 0})
            found["calls"] += kernel["calls"]
    return {"kernels": list(total.values()), "routes": routes, "operators": operators}


def engines(cell: Cell) -> dict[str, dict[str, Any]]:
    arm = next(arm for arm in ARMS if arm.name == cell.subject)
    found = {}
    for side in cells.SIDES:
        own = routes_of(arm.mode(side))
        found[side] = engine(cell, side, {route: "rlk" if route in own else "native" for route in ROUTES})
    return found


def different(count: int) -> Comparison:
    actual = torch.zeros(8)
    actual[:count] = 1.0
    return compare("update 1: logprob", actual, torch.zeros(8))


def test_every_arm_has_a_mode_on_each_side() -> None:
    modes = {arm.name: (arm.mode("train"), arm.mode("rollout")) for arm in ARMS}
    assert [modes[f"M{bits:03b}"] for bits in range(8)] == [(mode, mode) for mode in MODES]
    assert (modes["mixed_PR"], modes["mixed_RP"]) == (("native", "strict"), ("strict", "native"))
    assert (modes["G00"], modes["G01"]) == (("native",) * 2, ("strict",) * 2)
    assert (routes_of("strict"), routes_of("native"), routes_of("attention+logp")) == (ROUTES, (), ("attention", "logp"))


def test_a_mixed_cell_asks_for_its_own_routes_and_for_nothing_of_rlk_elsewhere() -> None:
    cell = cell_of("M100")
    assert cell.expect == "reported"
    assert cell.native == ("train", "train.ffn", "train.logp", "rollout", "rollout.ffn", "rollout.logp")
    assert {name for name, _ in cell.strict} == {"train.attention", "rollout.attention"}
    assert ("rollout.attention", "attention.paged") in cell.strict
    assert (cell_of("M111").expect, cell_of("M000").expect, cell_of("mixed_PR").expect) == ("equal", "different", "different")


@pytest.mark.parametrize("name", ["M001", "M010", "M011", "M100", "M101", "M110"])
def test_an_arm_is_green_and_sees_a_route_that_ran_the_other_operators(name: str) -> None:
    cell, evidence = cell_of(name), Evidence()
    summary: Any = SimpleNamespace(comparisons=(different(3),), manifest=SimpleNamespace(engines=engines(cell)))
    arm = next(arm for arm in ARMS if arm.name == name)
    cells.require_routes(arm, summary.manifest.engines)
    cells.plant(cell, evidence, summary)
    controls = evidence.close().controls
    assert len(controls) == 1 + 2 * len(ROUTES)
    assert all(control.caught for control in controls), controls


def test_a_route_in_other_modules_or_that_never_ran_ends_the_cell() -> None:
    cell, arm = cell_of("M010"), next(arm for arm in ARMS if arm.name == "M010")
    found = engines(cell)
    found["rollout"]["operators"]["ffn"] = "both"
    with pytest.raises(ValueError, match="ffn of the rollout side ran 3 times with both operators"):
        cells.require_routes(arm, found)
    found = engines(cell)
    found["train"]["routes"]["logp"]["runs"] = 0
    with pytest.raises(ValueError, match="logp of the train side ran 0 times"):
        cells.require_routes(arm, found)


@pytest.mark.parametrize("kernels", [[], ran("rms_norm.backward", "det_gemm.input_grad", "swiglu.backward", "rope.backward")])
def test_a_backward_pass_of_other_operators_ends_the_cell(kernels: Kernels) -> None:
    cell, arm = cell_of("M010"), next(arm for arm in ARMS if arm.name == "M010")
    found = engines(cell)
    found["train"]["routes"]["backward"]["kernels"] = kernels
    with pytest.raises(ValueError, match="M010: the backward pass ran kernels of"):
        cells.require_routes(arm, found)


def test_kernels_are_listed_under_their_route_and_the_rest_under_the_engine() -> None:
    found = engine(cell_of("M010"), "train", {})
    found["kernels"] += ran("embedding")
    by_side = kernels_of("train", found)
    assert [kernel["op"] for kernel in by_side["train.ffn"]] == ["rms_norm", "det_gemm", "swiglu"]
    assert by_side["train.attention"] == by_side["train.logp"] == []
    assert by_side["train"] == ran("embedding")
    assert kernels_of("train", {"kernels": ran("rope"), "routes": None}) == {"train": ran("rope")}
    found["kernels"][0]["calls"] = 1
    with pytest.raises(ValueError, match="counts more calls of rms_norm than its engine"):
        kernels_of("train", found)


@pytest.mark.parametrize(("count", "status"), [(0, Status.PASS), (3, Status.PASS)])
def test_a_mixed_arm_reports_any_number_of_differences(count: int, status: Status) -> None:
    cell = Cell("cpu", "ablation", "M100", "tiny", "logprob", expect="reported")
    assert judge_cell(cell, Findings(comparisons=[different(count)]), [], {}).status is status


def test_a_mixed_arm_without_a_valid_comparison_is_red() -> None:
    cell = Cell("cpu", "ablation", "M100", "tiny", "logprob", expect="reported")
    void = compare("update 1: logprob", torch.full((4,), torch.nan), torch.zeros(4))
    for findings in (Findings(), Findings(comparisons=[void])):
        assert judge_cell(cell, findings, [], {}).status is Status.FAIL


class Normed(torch.nn.Module):
    """Runs one operator of this project."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, torch.ones(x.shape[-1], dtype=torch.bfloat16), 1e-6)


def test_the_log_counts_each_kernel_in_the_route_that_ran_it() -> None:
    log, own, stock = RouteLog(), Normed(), torch.nn.Linear(16, 16, dtype=torch.bfloat16)
    log.watch("attention", own)
    log.watch("ffn", stock)
    x = torch.ones(2, 16, dtype=torch.bfloat16)
    own(stock(x))
    own(x)
    with log.of("backward"):
        own.forward(x)
    found = log.readback()
    assert {route: what["runs"] for route, what in found.items()} == {"attention": 2, "ffn": 1, "logp": 0, "backward": 1}
    assert [(kernel["op"], kernel["calls"]) for kernel in found["attention"]["kernels"]] == [("rms_norm", 2)]
    assert found["ffn"] == {"runs": 1, "computes": ["torch.nn.modules.linear.Linear"], "kernels": []}
    assert [kernel["calls"] for kernel in found["backward"]["kernels"]] == [1]
    log.reset()
    assert log.readback()["attention"] == {"runs": 0, "computes": [computes(own)], "kernels": []}


def test_the_log_says_whose_operators_a_route_has_and_refuses_nested_routes() -> None:
    log, first, second = RouteLog(), torch.nn.Identity(), torch.nn.Identity()
    log.watch("ffn", first, second)
    assert log.operators() == dict.fromkeys(ROUTES, "native")
    rlks = lambda x: x
    rlks.__module__ = "rlk.train.mixed"
    first.forward = rlks
    assert log.operators()["ffn"] == "both"
    second.forward = rlks
    assert log.operators()["ffn"] == "rlk"
    log.watch("attention", torch.nn.Sequential(first))
    with pytest.raises(RuntimeError, match="a route began inside another one"):
        next(iter(log._modules["attention"]))(torch.ones(1))


def wanted(**changed: Any) -> Wanted:
    asked: dict[str, Any] = {
        "checkpoint": Path("model"), "mode": "attention", "device": "cuda", "eager": True, "cudagraph_sizes": (), "numerics": DEFAULT,
        "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8, "kv_cache_bytes": 1 << 20, "seed": 0,
        "tensor_parallel_size": 1,
    }  # fmt: skip
    return Wanted(**{**asked, **changed})


@pytest.mark.parametrize("mode", MIXED_MODES)
def test_a_mixed_engine_asks_for_its_routes_and_reads_them_back(mode: Any) -> None:
    given, found = wanted(mode=mode).arguments(), wanted(mode=mode).read_back(2)
    own = routes_of(mode)
    assert given["hf_overrides"] == {"architectures": [MIXED_ARCHITECTURE]}
    assert given["additional_config"]["rlk"]["routes"] == list(own)
    assert ("block_size" in given) == ("attention" in own)
    assert "compilation_config" not in given
    assert found["operators"] == {route: "rlk" if route in own else "native" for route in ROUTES}
    assert found["sampler"].startswith("rlk.") == ("logp" in own)
    assert found["attention"][0].startswith("rlk.") == ("attention" in own)
    assert (found["worker"], found["cudagraph_mode"], found["compile_mode"]) == (WORKERS["cuda"], "NONE", 0)
    assert wanted(mode="strict").arguments()["hf_overrides"] == {"architectures": [ARCHITECTURE]}


def test_a_mixed_engine_captures_no_graphs_and_has_one_rank() -> None:
    with pytest.raises(EngineRefusal, match="enforce_eager=False with mode='attention'"):
        wanted(eager=False)
    with pytest.raises(EngineRefusal, match="mode='attention' with tensor_parallel_size=2"):
        wanted(tensor_parallel_size=2)
