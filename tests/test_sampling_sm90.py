"""The Hopper sampler: its source follows the rule on emulated threads, fits a multiprocessor, and is declared. Times are a card's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlk.kernels._native.cuda import CudaSource
from rlk.kernels.registry import declared_kernels
from rlk.kernels.sampling import sm90

SHARED_BYTES = 227 * 1024


def _emulate(folder: Path, *fault: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("emulated_sampling.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, str(script), str(folder), *fault], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_emulated_kernel_follows_the_rule(tmp_path: Path) -> None:
    done = _emulate(tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("the Hopper sampler follows the rule\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [("k == key && i <= id", "k == key && i < id"), ("atomicAdd(half, low) + low < low", "(atomicAdd(half, low), 0)")],
    ids=["a tie too few", "no carry"],
)
def test_the_emulation_sees_a_fault(tmp_path: Path, fault: tuple[str, str]) -> None:
    done = _emulate(tmp_path, *fault)
    assert done.returncode != 0
    assert "AssertionError" in done.stderr


@pytest.mark.parametrize("most", [512, 1024])
@pytest.mark.parametrize("ids", [32, 301, 152576, 1 << 18])
def test_a_row_fits_a_cluster(most: int, ids: int) -> None:
    threads, groups = sm90.deal(ids, most)
    assert sm90.FEWEST <= threads <= most
    assert threads % 32 == 0
    assert threads * 4 * groups * sm90.CLUSTER >= ids
    assert sm90.shared_bytes(threads, groups) <= SHARED_BYTES


def test_blocks_of_many_rows_share_a_multiprocessor() -> None:
    reserved = 1024
    assert 2 * (sm90.shared_bytes(*sm90.deal(152576, 512)) + reserved) <= SHARED_BYTES + reserved


def test_the_kernel_id_is_declared_and_covers_the_source(tmp_path: Path) -> None:
    assert re.fullmatch(r"cuda:sampling:[0-9a-f]{12}", sm90.SOURCE.kernel_id)
    assert declared_kernels()[sm90.SOURCE.kernel_id] == ("sampling",)
    changed = tmp_path / "sm90.cu.h"
    changed.write_text(sm90.SOURCE.files[0].read_text() + "\n")
    assert CudaSource("sampling", changed, *sm90.SOURCE.files[1:]).kernel_id != sm90.SOURCE.kernel_id
