"""Heads and gradients of rms_norm on Hopper: their source gives the operators' bytes on emulated threads, and is declared."""

from __future__ import annotations

import ctypes
import re
import runpy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rlk.contract.topology import token_leaves
from rlk.kernels._native.cuda import CudaSource
from rlk.kernels.qk_norm import qk_norm
from rlk.kernels.registry import declared_kernels
from rlk.kernels.rms_norm import rms_norm, rms_norm_gamma_grad, sm90

build: Callable[..., ctypes.CDLL] = runpy.run_path(str(Path(__file__).with_name("emulated.py")))["build"]
EPS, LENGTHS = 1e-6, (100, 65, 11, 24)
TOKENS = sum(LENGTHS)
LEAVES = token_leaves(LENGTHS, canonical_cp=2)
INDEX, OFFSETS = torch.tensor(LEAVES.index), torch.tensor(LEAVES.offsets)


def emulated(folder: Path, width: int, *changes: tuple[str, str]) -> ctypes.CDLL:
    """The kernels for ``width`` on a processor, with (text, other) changed in their source."""
    return build(folder, sm90.SOURCE, "emulated_norms.cpp", sm90.definitions(width), *changes)


def operands(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, dy and gamma: ordinary, large and signed zero values, so far apart that every sum of some is rounded."""
    generator = torch.Generator().manual_seed(width)
    draw = lambda: torch.randn(TOKENS, width, generator=generator)
    x, dy = (draw() * torch.exp2(6 * torch.rand(TOKENS, width, generator=generator))).bfloat16(), draw().bfloat16()
    x[2] *= 1e15
    x[3] = dy[3] = -0.0
    return x, dy, torch.randn(width, generator=generator).bfloat16()


def run(library: ctypes.CDLL, width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx, the scales of the rows, and the leaves' parts of gamma's gradient."""
    x, dy, gamma = operands(width)
    dx, scales, parts = torch.full_like(x, float("nan")), torch.empty(TOKENS), torch.full((len(OFFSETS) - 1, width), float("nan"))
    step = sm90.Step(*(tensor.data_ptr() for tensor in (x, gamma, dy, dx, scales, INDEX, OFFSETS, parts)), eps=EPS)
    library.gradient(ctypes.byref(step), TOKENS)
    library.gains(ctypes.byref(step), TOKENS, len(parts))
    return dx, scales, parts


def wanted(width: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the operators give; scales by the row tree."""
    x, dy, gamma = operands(width)
    leaf = x.clone().requires_grad_()
    dx = torch.autograd.grad(rms_norm(leaf, gamma, EPS), leaf, dy)[0]
    squares = np.zeros((TOKENS, 1 << (width - 1).bit_length()), dtype=np.float32)
    squares[:, :width] = x.float().numpy() ** 2
    while squares.shape[1] > 1:
        squares = squares[:, : squares.shape[1] // 2] + squares[:, squares.shape[1] // 2 :]
    scales = np.float32(1) / np.sqrt(squares[:, 0] / np.float32(width) + np.float32(EPS))
    one = lambda leaf: rms_norm_gamma_grad(x, dy, EPS, INDEX[OFFSETS[leaf] : OFFSETS[leaf + 1]], _whole(leaf))
    return dx, torch.from_numpy(scales), torch.stack([one(leaf) for leaf in range(len(OFFSETS) - 1)])


def _whole(leaf: int) -> torch.Tensor:
    return torch.tensor([0, int(OFFSETS[leaf + 1] - OFFSETS[leaf])])


def differing(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> list[int]:
    return [int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("width", [4096, 5120, 514])
def test_the_emulated_kernels_give_the_operators_bytes(tmp_path: Path, width: int) -> None:
    assert differing(run(emulated(tmp_path, width), width), wanted(width)) == [0, 0, 0]


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (("plus(sums[i], sums[i + COUNT / 2])", "plus(sums[i], sums[COUNT - 1 - i])"), (1, 2)),
        (("TOKENS * warp + lane;", "TOKENS * warp + lane + (warp == 1);"), (2,)),
        (("w < WARPS && start", "w < WARPS - 1 && start"), (2,)),
        (("__fsub_rn(scaled.x, hat.x)", "__fsub_rn(scaled.x, -hat.x)"), (0,)),
    ],
    ids=["another tree", "a group that begins late", "a group too few", "a sign"],
)
def test_the_emulation_sees_a_fault(tmp_path: Path, fault: tuple[str, str], seen: tuple[int, ...]) -> None:
    found = differing(run(emulated(tmp_path, 1024, fault), 1024), wanted(1024))
    assert all(found[i] > 0 for i in seen)


def packed_heads() -> tuple[torch.Tensor, torch.Tensor]:
    """[45, 3, 128] heads inside wider tokens, and gains."""
    x, _, gamma = operands(4096)
    return x[:45, :640].unflatten(1, (5, 128))[:, 1:4], gamma[:128].clone()


def emulated_heads(library: ctypes.CDLL) -> torch.Tensor:
    x, gamma = packed_heads()
    y = torch.full(x.shape, float("nan"), dtype=x.dtype)
    library.heads(ctypes.byref(sm90.heads_step(x, gamma, y, 135, 3, x.stride(0), x.stride(1), EPS)), -(-135 // sm90.HEADS))
    return y


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (("lane + 16 * i", "lane + 16 * i"), False),
        (("for (int other = 8; other; other /= 2)", "for (int other = 4; other; other /= 2)"), True),
        (("row / step.heads", "row / (step.heads + 1)"), True),
    ],
    ids=["as it is", "half a head", "heads of other tokens"],
)
def test_heads_have_the_operators_bytes(tmp_path: Path, fault: tuple[str, str], seen: bool) -> None:
    x, gamma = packed_heads()
    found = emulated_heads(emulated(tmp_path, sm90.HEAD, fault))
    assert torch.equal(found.view(torch.int16), qk_norm(x, gamma, EPS).view(torch.int16)) != seen


def test_rows_that_are_narrow_or_cut_are_left_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90, "hopper", lambda device: True)
    wide = torch.zeros(3, 4096, dtype=torch.bfloat16)
    assert sm90.takes(wide, wide)
    assert not sm90.takes(wide[:0])
    assert not sm90.takes(wide[:, :128])
    assert not sm90.takes(wide, wide.view(-1)[1:])
    assert not sm90.takes(torch.zeros(1, 2 * sm90.WIDEST, dtype=torch.bfloat16))
    heads = torch.zeros(3, 4, 128, dtype=torch.bfloat16)
    assert sm90.takes_heads(heads, heads[0, 0], 512, 128)
    assert not sm90.takes_heads(heads, heads[0, 0], 513, 128)
    assert not sm90.takes_heads(heads[..., :64], heads[0, 0], 512, 128)
    for rows in (1 << 24, (1 << 31) - sm90.HEADS):  # a thread counts them in 32 bits
        many = torch.empty(rows, 1, 128, dtype=torch.bfloat16, device="meta")
        assert sm90.takes_heads(many, many[0, 0], 128, 128) == (rows == 1 << 24)


def test_the_kernel_id_is_declared_and_covers_the_source(tmp_path: Path) -> None:
    assert re.fullmatch(r"cuda:rms_norm:[0-9a-f]{12}", sm90.SOURCE.kernel_id)
    assert declared_kernels()[sm90.SOURCE.kernel_id] == ("rms_norm", "qk_norm")
    files, changed = sm90.SOURCE.files, tmp_path / "changed"
    for i, file in enumerate(files):
        changed.write_text(file.read_text() + "\n")
        assert CudaSource("rms_norm", *files[:i], changed, *files[i + 1 :]).kernel_id != sm90.SOURCE.kernel_id
