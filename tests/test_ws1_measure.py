"""How operator cells are measured: in which settings, which kernels count, and which ids this tree declares."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rlk.acceptance import measure as measuring
from rlk.acceptance.collector import Evidence
from rlk.acceptance.poison import WORKSPACE, poisoned_memory
from rlk.acceptance.validate import KERNEL_ID
from rlk.contract.judgments import FORWARD_ACCURACY, FORWARD_INVARIANCE, OPERATORS
from rlk.contract.operators import SHAPES
from rlk.kernels.registry import declared_kernels
from rlk.kernels.rope import rope_table


@pytest.fixture
def small_rope(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two shapes, so that calls are added up over both."""
    at = replace(SHAPES["rope"]["short"][0], neighbours=(65,), shifts=(1,))
    monkeypatch.setitem(SHAPES, "rope", {"short": (at, replace(at, name="again")), "primary": ()})
    measuring._case.cache_clear()
    rope_table.cache_clear()
    yield
    measuring._case.cache_clear()


def test_only_kernels_that_ran_for_the_judgment_are_handed_in(small_rope: None) -> None:
    evidence = Evidence()
    measuring.measure("rope", "short", FORWARD_ACCURACY, "cpu", evidence)
    assert [(use.op, use.calls) for use in evidence.close().kernels] == [("rope", 2)]  # not rope.table


def test_references_are_computed_in_full_precision(small_rope: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    inner = measuring._invariance

    def spied(*arguments: object) -> None:
        seen.append((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")))
        inner(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(measuring, "_invariance", spied)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu"):
            measuring.measure("rope", "short", FORWARD_INVARIANCE, "cpu", Evidence())
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [("highest", False, False)] * 2


@pytest.mark.parametrize("before", [None, ":16:8"])
def test_poisoned_memory_lets_a_gpu_multiply_and_puts_everything_back(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE, raising=False)
    if before is not None:
        monkeypatch.setenv(WORKSPACE, before)
    with poisoned_memory():
        assert os.environ[WORKSPACE] == (before or ":4096:8")
        assert torch.empty(3).isnan().all()
    assert os.environ.get(WORKSPACE) == before
    assert not torch.are_deterministic_algorithms_enabled()


def test_every_operator_may_report_a_kernel_of_each_own_backend() -> None:
    declared = declared_kernels()
    assert all(KERNEL_ID.fullmatch(kernel_id) for kernel_id in declared)
    for backend, besides in (("cpu", set()), ("triton", {"serving", "sampling", "update"})):
        covered = {op for kernel_id, operators in declared.items() if kernel_id.startswith(f"{backend}:") for op in operators}
        assert covered == {op.name for op in OPERATORS} | besides


def test_kernels_are_declared_without_triton_and_without_a_build(tmp_path: object) -> None:
    code = "import sys; sys.modules['triton'] = None\nfrom rlk.kernels.registry import declared_kernels\nprint(*declared_kernels())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "RLK_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == list(declared_kernels())
    assert not os.listdir(str(tmp_path))
