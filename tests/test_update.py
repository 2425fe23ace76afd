"""The arithmetic of an update: fused steps against their composition, what they compile to, what they refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from rlk.contract.update import AdamParams
from rlk.kernels._triton.aot import TARGETS, Compiled, compile_all
from rlk.kernels.update import AdamTensors, adam, square_sums
from rlk.kernels.update import cpu as composed
from rlk.kernels.update.triton import _tables as tables


def test_interpreted_bytes() -> None:
    script = Path(__file__).with_name("interpreted_update.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("every byte is right\n")


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    return list(compile_all(["update"]))


def test_compiled_steps_neither_fuse_nor_spill(compiled: list[Compiled]) -> None:
    assert {(row.kernel, row.target) for row in compiled} == set(product(("_adam", "_squares", "_fold", "_join"), TARGETS))
    assert [row.line() for row in compiled if row.spills] == []
    cuda = [row for row in compiled if row.target == "cuda:90"]
    inexact = r"\bfma\.rn\.f(?:32|64)|\.ftz\b|\b(?:div|sqrt|rsqrt|rcp)\.(?:approx|full)"
    assert [row.line() for row in cuda if re.search(inexact, row.text)] == []


def test_aligned_tensors_are_read_four_elements_at_a_time(compiled: list[Compiled]) -> None:
    passes = [row for row in compiled if row.kernel in ("_adam", "_squares") and row.target == "cuda:90"]
    assert {("ALIGN=16" in row.constants, "ld.global.v4.b32" in row.text) for row in passes} == {(True, True), (False, False)}


def test_how_much_is_held_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shards, found = torch.randn(8, 3, 700), []
    for at_once in (1 << 24, 5000):
        monkeypatch.setattr(composed, "_AT_ONCE", at_once)
        state = [torch.full((3, 2100), 0.5 + at) for at in range(4)]
        adam([AdamTensors(state[0].bfloat16(), *state)], [True])(AdamParams().step(1), 0.5)
        found.append([square_sums([shards], 1024)(), *state])
    assert all(torch.equal(*held) for held in zip(*found, strict=True))


def test_a_scalar_is_updated_like_a_row_of_one() -> None:
    held, row = ([torch.full(shape, value) for value in (0.5, 0.25, 0.125, 2.0)] for shape in ((), (1,)))
    for state in (held, row):
        adam([AdamTensors(state[0].bfloat16(), *state)], [True])(AdamParams().step(1), 1.0)
    assert [tensor.item() for tensor in held] == [tensor.item() for tensor in row]


def test_tables_find_every_block() -> None:
    held = [torch.zeros(1)]
    made = tables(held, [(1600, 64, 128), (16, 32, 48)], [True, False], 1024)
    assert (made.table.tolist(), made.owners.tolist()) == ([[1600, 64, 128, 1, 0], [16, 32, 48, 0, 2]], [0, 0, 1])
    assert (made.bounds.tolist(), made.longest, made.align) == ([0, 2, 3], 2, 16)
    assert tables(held, [(1600, 64, 128), (16, 32, 52)], [True, False], 1024).align == 1


def test_wrong_operands_are_refused() -> None:
    ones = torch.ones(4, 4)

    def run(weight: torch.Tensor, gradient: torch.Tensor) -> None:
        good = AdamTensors(ones.bfloat16(), ones, ones, ones, ones)
        adam([good, good._replace(weight=weight, gradient=gradient)], [True, True])

    with pytest.raises(ValueError, match="weight of parameter 1"):
        run(ones, ones)
    with pytest.raises(ValueError, match="contiguous"):
        run(ones.bfloat16(), torch.ones(4, 8)[:, ::2])
    with pytest.raises(ValueError, match="on meta"):
        run(ones.bfloat16(), ones.to("meta"))
    for tensors, block, fault in (
        ([ones], 3, "power of two"),
        ([ones], 0, "power of two"),
        ([], 4, "0 tensors"),
        ([ones.double()], 4, "fp32"),
    ):
        with pytest.raises(ValueError, match=fault):
            square_sums(tensors, block)
    for tensor in (ones.to("meta"), ones[:, ::2], ones.t()[None], ones[0], ones.view(2, 2, 2, 2), ones[:0]):
        with pytest.raises(ValueError, match="on one device"):
            square_sums([ones, tensor], 4)
