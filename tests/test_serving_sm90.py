"""The Hopper residual sum and norm: its source gives the operators' bytes on emulated threads, and is declared."""

from __future__ import annotations

import ctypes
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlk.kernels._native.cuda import CudaSource
from rlk.kernels.registry import declared_kernels
from rlk.kernels.serving import add_rms_norm, sm90

build: Callable[..., ctypes.CDLL] = runpy.run_path(str(Path(__file__).with_name("emulated.py")))["build"]
ROWS, EPS = 200, 1e-6
SHOWN = ("step.total[row + pair] = value[i];", "step.total[row + pair] = __float_as_int(scale);")
"""In place of the sum of its row every pair shows the row's scale: bf16 results hide most orders of addition."""


def emulated(folder: Path, width: int, *changes: tuple[str, str]) -> ctypes.CDLL:
    """The kernel for ``width`` on a processor, with (text, other) changed in its source."""
    return build(folder, sm90.SOURCE, "emulated_add_norm.cpp", sm90.definitions(width), *changes)


def operands(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows of ordinary, large and signed zero values, and gains. Their squares are so far apart that every sum of some is rounded."""
    generator = torch.Generator().manual_seed(width)
    draw = lambda: torch.randn(ROWS, width, generator=generator)
    x, y = (draw() * torch.exp2(6 * torch.rand(ROWS, width, generator=generator))).bfloat16(), draw().bfloat16()
    x[2] *= 1e15
    x[3] = y[3] = -0.0
    return x, y, torch.randn(width, generator=generator).bfloat16()


def run(library: ctypes.CDLL, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y, gamma = operands(width)
    step, total, normed = sm90.prepare(x, y, gamma, EPS)
    library.emulate(ctypes.byref(step), len(x))
    return total, normed


def wrong_scales(folder: Path, width: int, *changes: tuple[str, str]) -> int:
    """Rows whose scale is not that of the row tree."""
    shown = run(emulated(folder, width, SHOWN, *changes), width)[0].view(torch.float32).numpy()
    x, y, _ = operands(width)
    squares = np.zeros((ROWS, 1 << (width - 1).bit_length()), dtype=np.float32)
    squares[:, :width] = (x + y).float().numpy() ** 2
    while squares.shape[1] > 1:
        squares = squares[:, : squares.shape[1] // 2] + squares[:, squares.shape[1] // 2 :]
    scales = np.float32(1) / np.sqrt(squares / np.float32(width) + np.float32(EPS))
    return int((shown != scales).any(axis=1).sum())


@pytest.mark.parametrize("width", [4096, 5120, 1024, 514])
def test_the_emulated_kernel_gives_the_operators_bytes(tmp_path: Path, width: int) -> None:
    expected = add_rms_norm(*operands(width), EPS)
    for found, wanted in zip(run(emulated(tmp_path, width), width), expected):
        assert torch.equal(found.view(torch.int16), wanted.view(torch.int16))


def test_a_row_is_summed_by_the_row_tree(tmp_path: Path) -> None:
    assert wrong_scales(tmp_path, 4096) == 0


@pytest.mark.parametrize(
    "fault",
    [
        ("fold<PAIRS>(sums);", "for (int i = 1; i < PAIRS; ++i) sums[0] = plus(sums[0], sums[i]);"),
        ("fold<ROW_WARPS>(of_warp);", "for (int w = 1; w < ROW_WARPS; ++w) of_warp[0] = plus(of_warp[0], of_warp[w]);"),
        ("int other = 16; other; other /= 2", "int other = 1; other < 32; other *= 2"),
    ],
    ids=["pairs", "warps", "lanes"],
)
def test_another_order_is_seen(tmp_path: Path, fault: tuple[str, str]) -> None:
    assert wrong_scales(tmp_path, 4096, fault) > 0


def test_only_rows_of_whole_pairs_on_a_hopper_card_come_here() -> None:
    x = torch.zeros(2, 4096, dtype=torch.bfloat16)
    assert not sm90.takes(x, x, x[0])


def test_the_kernel_id_is_declared_and_covers_the_source(tmp_path: Path) -> None:
    assert re.fullmatch(r"cuda:serving:[0-9a-f]{12}", sm90.SOURCE.kernel_id)
    assert declared_kernels()[sm90.SOURCE.kernel_id] == ("rms_norm",)
    files, changed = sm90.SOURCE.files, tmp_path / "changed"
    for i, file in enumerate(files):
        changed.write_text(file.read_text() + "\n")
        assert CudaSource("serving", *files[:i], changed, *files[i + 1 :]).kernel_id != sm90.SOURCE.kernel_id
