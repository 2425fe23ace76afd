"""Hopper products: every plan fits a multiprocessor, and the id covers source and plans. Bytes are judged on a card."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest
import torch

from rlk.contract.models import QWEN3_8B
from rlk.contract.workloads import GEMM_ROWS
from rlk.kernels._native.cuda import CudaSource
from rlk.kernels.det_gemm import sm90
from rlk.kernels.det_gemm.sm90_plans import DEPTH, MOST_LEAVES, Plan, desks, product_plan, stage_bytes
from rlk.kernels.registry import declared_kernels

SHARED_BYTES = 227 * 1024
ROWS = sorted({1, 16, 33, 64, 65, 128, 129, 256, 257, 512, 513, 1024, 2048, 4096, 8192, *GEMM_ROWS})
WIDTHS = sorted({size // share for g in QWEN3_8B.gemms() for size in (g.n, g.k) for share in (1, 8)})
CASES = itertools.product(ROWS, WIDTHS, (1, MOST_LEAVES), (False, True))
CHOSEN = {(plan, leaves, across) for rows, n, leaves, across in CASES if (plan := product_plan(rows, n, leaves, across))}


def test_some_shapes_of_either_order_have_a_plan() -> None:
    assert {(leaves, across) for _, leaves, across in CHOSEN} == set(itertools.product((1, MOST_LEAVES), (False, True)))


@pytest.mark.parametrize(("plan", "leaves", "across"), sorted(CHOSEN, key=str), ids=str)
def test_a_plan_fits_the_instruction_and_a_multiprocessor(plan: Plan, leaves: int, across: bool) -> None:
    assert plan.columns % 8 == 0
    assert 8 <= plan.columns <= 256
    assert leaves % plan.groups == 0
    assert not (plan.pair and plan.groups > 1)
    assert plan.pair != "b" or plan.columns % (128 if across else 16) == 0  # each block copies half of whole swizzled lines
    waiting = desks(plan, leaves // plan.groups)
    workers = 128 * plan.consumers
    assert plan.stages * (stage_bytes(plan, across) + 16) + 4 * workers * sum(waiting.shared) + 1024 <= SHARED_BYTES
    assert 4 * workers * plan.columns // 2 + 1024 <= SHARED_BYTES
    floats = plan.columns // 2
    for level in range((leaves // plan.groups).bit_length() - 1):
        held = waiting.kept[level] + waiting.shared[level]
        assert held <= floats
        assert held == floats or (level > 0 and waiting.workspace == 2 * floats * workers)


def test_leaves_that_fit_nowhere_on_the_card_are_refused() -> None:
    with pytest.raises(ValueError, match="fewer stages"):
        desks(Plan(2, 256, 4), 8)


def test_only_hopper_and_whole_stages_come_here() -> None:
    x = torch.ones(8, 2 * DEPTH, dtype=torch.bfloat16)
    assert not sm90.takes(x, x, torch.empty(8, 8), 1, 2 * DEPTH)
    assert product_plan(64, 6144, 4, False) is None
    assert product_plan(1024, 4096, 1, True) is None


def test_the_instruction_names_every_accumulator_once() -> None:
    text = sm90._instruction(48, True)
    assert "m64n48k16.f32.bf16.bf16" in text
    assert [int(i) for i in re.findall(r'"\+f"\(acc\[(\d+)\]\)', text)] == list(range(24))
    assert text.count(", 0, 1;") == 1


def test_the_kernel_id_is_declared_and_covers_the_source(tmp_path: Path) -> None:
    assert re.fullmatch(r"cuda:det_gemm:[0-9a-f]{12}", sm90.SOURCE.kernel_id)
    assert declared_kernels()[sm90.SOURCE.kernel_id] == ("det_gemm", "lm_head", "batch_invariant_logp")
    changed = tmp_path / "sm90.cu.h"
    changed.write_text(sm90.SOURCE.files[0].read_text() + "\n")
    assert CudaSource("det_gemm", changed, *sm90.SOURCE.files[1:]).kernel_id != sm90.SOURCE.kernel_id


def test_recorded_times_are_those_of_the_tables() -> None:
    found = json.loads((Path(__file__).parents[1] / "benchmarks" / "results" / "det_gemm_h200.json").read_text())
    timed = {case: row for case, row in found["times"].items() if "ratio" in row}
    assert len(timed) > 50
    for case, row in timed.items():
        assert row["ratio"] == round(row["det_gemm_us"][1] / row["torch_us"][1], 3), case
        if "weight gradient" not in case:
            across = "input gradient" in case
            plan = product_plan(row["rows"], row["k"] if across else row["n"], row["leaves"], across)
            assert row["plan"] == (str(plan) if plan else "Triton"), case
    for name, kept in found["summary"].items():
        assert kept["worst"] <= max(row["ratio"] for row in timed.values()), name
