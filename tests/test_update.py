"""The arithmetic of an update: fused steps against their composition, what they compile to, what they refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlk.contract.update import AdamParams
from rlk.kernels._triton.aot import TARGETS, compile_all
from rlk.kernels.update import adam, block_squares
from rlk.kernels.update import cpu as composed


def test_interpreted_bytes() -> None:
    script = Path(__file__).with_name("interpreted_update.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("every byte is right\n")


def test_compiled_steps_neither_fuse_nor_spill() -> None:
    compiled = list(compile_all(["update"]))
    assert {row.target for row in compiled} == set(TARGETS)
    assert {row.kernel for row in compiled} == {"_adam", "_squares"}
    assert [row.line() for row in compiled if row.spills] == []
    cuda = [row for row in compiled if row.target == "cuda:90"]
    inexact = r"\bfma\.rn\.f(?:32|64)|\.ftz\b|\b(?:div|sqrt|rsqrt|rcp)\.(?:approx|full)"
    assert [row.line() for row in cuda if re.search(inexact, row.text)] == []


def test_how_many_shards_are_squared_at_a_time_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shards = torch.randn(8, 3, 700)
    found = block_squares(shards, 1024)
    monkeypatch.setattr(composed, "_AT_ONCE", 5000)
    assert torch.equal(block_squares(shards, 1024), found)


def test_a_scalar_is_updated_like_a_row_of_one() -> None:
    held, row = ([torch.full(shape, value) for value in (0.5, 0.25, 0.125, 2.0)] for shape in ((), (1,)))
    for master, m, v, gradient in (held, row):
        adam(master.bfloat16(), master, m, v, gradient, AdamParams().step(1), scale=1.0, decays=True)
    assert [tensor.item() for tensor in held] == [tensor.item() for tensor in row]


def test_wrong_operands_are_refused() -> None:
    ones, step = torch.ones(4, 4), AdamParams().step(1)
    with pytest.raises(ValueError, match="weight"):
        adam(ones, ones, ones, ones, ones, step, scale=1.0, decays=True)
    with pytest.raises(ValueError, match="contiguous"):
        adam(ones.bfloat16(), ones, ones, ones, torch.ones(4, 8)[:, ::2], step, scale=1.0, decays=True)
    with pytest.raises(ValueError, match="power of two"):
        block_squares(ones, 3)
    with pytest.raises(ValueError, match="fp32"):
        block_squares(ones.double(), 4)
