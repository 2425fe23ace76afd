"""Hopper products: every plan fits a multiprocessor, and the id covers source and plans. Bytes are judged on a card."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk.contract.models import QWEN3_8B
from rlk.contract.topology import token_leaves
from rlk.contract.workloads import GEMM_ROWS
from rlk.kernels._native import cuda
from rlk.kernels._native.cuda import CudaSource
from rlk.kernels._native.wgmma import instruction
from rlk.kernels.det_gemm import sm90, sm90_tokens
from rlk.kernels.det_gemm import triton as backend
from rlk.kernels.det_gemm.sm90_plans import DEPTH, MOST_LEAVES, Plan, kept_floats, product_plan, shared_bytes
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
    assert plan.lines == 1 or (leaves == 1 and not across)  # a stage may end past the depth, where zeros are read, but not in the next leaf
    each = leaves // plan.groups
    assert shared_bytes(plan, each, across) <= SHARED_BYTES
    assert all(0 <= kept <= plan.columns // 2 and kept % 4 == 0 for kept in kept_floats(plan, each))
    assert plan.columns // 2 + sum(kept_floats(plan, each)) <= 200  # registers of a thread


def test_a_plan_that_needs_too_much_is_seen() -> None:
    assert shared_bytes(Plan(2, 256, 4), MOST_LEAVES, False) > SHARED_BYTES
    assert shared_bytes(Plan(2, 256, 4), 1, False) <= SHARED_BYTES


def test_only_hopper_and_whole_stages_come_here() -> None:
    x = torch.ones(8, 2 * DEPTH, dtype=torch.bfloat16)
    assert not sm90.takes(x, x, torch.empty(8, 8), 1, 2 * DEPTH)
    assert product_plan(64, 6144, 4, False) is None
    assert product_plan(1024, 4096, 1, True) is None


def test_a_weight_gradient_of_eight_leaves_fits_a_multiprocessor_and_comes_here_on_hopper_only() -> None:
    assert sm90_tokens.SHARED_BYTES <= SHARED_BYTES
    assert sm90_tokens.STAGES >= 4  # warps that copy in turn
    assert sm90_tokens.COLUMNS % 64 == 0
    x = torch.ones(16, 4096, dtype=torch.bfloat16)
    assert not sm90_tokens.takes(x, x, sm90_tokens.LEAVES)


def test_operands_that_the_copy_engine_cannot_read_stay_with_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_tokens, "hopper", lambda device: True)
    x = torch.ones(4096, 1024, dtype=torch.bfloat16)
    assert sm90_tokens.takes(x, x, 8)
    assert not sm90_tokens.takes(x[:, :100], x, 8)
    assert not sm90_tokens.takes(x, x, 4)


@pytest.mark.parametrize(
    ("lengths", "short"),
    [((1024,) * 4, False), ((4000, 8000, 2500), False), ((1500, 700, 333, 900, 600, 63), True), ((100,) * 40, True), ((64,) * 4, True)],
)
def test_tokens_of_short_samples_are_gathered_before(lengths: tuple[int, ...], short: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    order = token_leaves(lengths)
    index, offsets = torch.tensor(order.index), torch.tensor(order.offsets)
    assert sm90_tokens.short_runs(index, sum(lengths)) == short
    seen: list[tuple[int, bool]] = []
    monkeypatch.setattr(sm90_tokens, "takes", lambda x, dy, leaves: True)
    monkeypatch.setattr(backend, "_gathered", lambda source, index, offsets, depth: source.new_empty(len(index) + 8, source.shape[1]))
    monkeypatch.setattr(sm90_tokens, "weight_grad", lambda op, x, dy, index, offsets, out: seen.append((len(x), index is None)))
    x = torch.ones(sum(lengths), 8, dtype=torch.bfloat16)
    backend.weight_grad("det_gemm.weight_grad", x, x, index, offsets)
    assert seen == [(len(index) if short else sum(lengths), short)]


def test_the_copy_engine_sees_runs_and_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[int], list[int], list[int]]] = []

    def encode(
        function: str, view: object, kind: int, rank: int, data: object, sizes: Any, strides: Any, box: Any, *others: object
    ) -> None:
        seen.append((list(sizes), list(strides), list(box)))

    monkeypatch.setattr(cuda, "_checked", encode)
    words = sm90_tokens._mapped(0, (50, 576), 640, 3)
    assert seen == [
        *(([576, 50], [1280], [64, 1 << level]) for level in range(5)),
        ([64, 50, 9], [1280, 128], [64, sm90_tokens.DEPTH, 3]),
    ]
    assert len(words) * 8 == 6 * 128


def test_a_weight_gradient_is_launched_on_every_pair_of_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[tuple[str, int, int]] = []

    class Kernel:
        def __init__(self, name: str) -> None:
            self.name = name

        def launch(self, blocks: int, arguments: Any, device: torch.device) -> None:
            problem = arguments[-1]
            assert (problem.rows, problem.columns, problem.tokens) == (768, 4096, 300)
            assert problem.copies
            launched.append((self.name, blocks, len(arguments)))

    monkeypatch.setattr(sm90_tokens, "_kernels", lambda device: (Kernel("product"), Kernel("schedule")))
    monkeypatch.setattr(sm90_tokens, "_maps", lambda x, values: None)
    monkeypatch.setattr(sm90_tokens, "_out_map", lambda data, rows, columns: None)
    monkeypatch.setattr(sm90_tokens, "processors", lambda device: 132)
    monkeypatch.setattr(sm90_tokens, "ran", lambda op, source: None)
    order = token_leaves((300,))
    x, dy, out = torch.ones(300, 4096, dtype=torch.bfloat16), torch.ones(300, 768, dtype=torch.bfloat16), torch.empty(768, 4096)
    sm90_tokens.weight_grad("det_gemm.weight_grad", x, dy, torch.tensor(order.index), torch.tensor(order.offsets), out)
    steps = len(order.index) // 32 + 8
    assert launched == [("schedule", -(-steps // 4), 1), ("product", 132, 4)]


def test_the_instruction_names_every_accumulator_once() -> None:
    text = instruction("multiply", 48, held=False, across=True)
    assert "m64n48k16.f32.bf16.bf16" in text
    assert [int(i) for i in re.findall(r'"\+f"\(o\[(\d+)\]\)', text)] == list(range(24))
    assert text.count(", 0, 1;") == 1
    assert instruction("multiply", 48, held=False, across=True, a_across=True).count(", 1, 1;") == 1


def test_the_kernel_id_is_declared_and_covers_the_source(tmp_path: Path) -> None:
    assert re.fullmatch(r"cuda:det_gemm:[0-9a-f]{12}", sm90.SOURCE.kernel_id)
    assert declared_kernels()[sm90.SOURCE.kernel_id] == ("det_gemm", "lm_head", "batch_invariant_logp")
    changed = tmp_path / "sm90.cu.h"
    changed.write_text(sm90.SOURCE.files[0].read_text() + "\n")
    assert CudaSource("det_gemm", changed, *sm90.SOURCE.files[1:]).kernel_id != sm90.SOURCE.kernel_id


def test_the_weight_gradients_kernel_is_declared_and_covers_its_sources(tmp_path: Path) -> None:
    files = sm90_tokens.SOURCE.files
    assert declared_kernels()[sm90_tokens.SOURCE.kernel_id] == ("det_gemm", "lm_head", "batch_invariant_logp")
    for i, path in enumerate(files):
        changed = tmp_path / path.name
        changed.write_text(path.read_text() + "\n")
        assert CudaSource("det_gemm", *files[:i], changed, *files[i + 1 :]).kernel_id != sm90_tokens.SOURCE.kernel_id


def test_recorded_times_are_those_of_the_tables() -> None:
    found = json.loads((Path(__file__).parents[1] / "benchmarks" / "results" / "det_gemm_h200.json").read_text())
    timed = {case: row for case, row in found["times"].items() if "ratio" in row}
    assert len(timed) > 50
    for case, row in timed.items():
        assert row["ratio"] == round(row["det_gemm_us"][1] / row["torch_us"][1], 3), case
        if "weight gradient" in case:
            assert row["plan"] == sm90_tokens.__name__, case
        else:
            across = "input gradient" in case
            plan = product_plan(row["rows"], row["k"] if across else row["n"], row["leaves"], across)
            assert row["plan"] == (str(plan) if plan else "Triton"), case
    for name, kept in found["summary"].items():
        assert kept["worst"] <= max(row["ratio"] for row in timed.values()), name
