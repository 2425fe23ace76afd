"""The Triton operators without a card: compiled for sm_90 and gfx942, read as assembly, and interpreted for their indices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from rlk.kernels._triton import TritonSource, aot, from_triton, launch
from rlk.kernels._triton.aot import TARGETS, Compiled, compile_all, compile_launch
from rlk.kernels._triton.launch import OPTIONS, recorded
from rlk.kernels._triton.numerics import row_tree
from rlk.kernels.det_gemm.triton_tiles import MOST_LEAVES, product_tile, token_tile
from rlk.kernels.dispatch import BackendUnavailable
from rlk.kernels.registry import declared_kernels
from rlk.kernels.rms_norm import rms_norm

OPERATORS = ("det_gemm", "embedding", "lm_head", "pack", "qk_norm", "rms_norm", "rope", "silu", "swiglu")
EXPONENTIAL = ("silu", "swiglu")
GROUP_OF_16 = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.|mma\.sync\.aligned\.m16n8k16\.|v_mfma_f32_16x16x16_bf16$")
TREE_STACK = 512
"""Bytes of stack that a kernel may use which joins leaves: what waits between two leaves, never inside the loop over k."""


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    return list(compile_all(OPERATORS))


def _joins_leaves(row: Compiled) -> bool:
    return re.search(r"LEAVES=(?!1\b)", row.constants) is not None and row.multiplies


def test_every_operator_compiles_for_both_targets(compiled: list[Compiled]) -> None:
    shared = {"lm_head": "det_gemm", "qk_norm": "rms_norm"}
    assert {(row.operator, row.target) for row in compiled} == {(shared.get(op, op), target) for op in OPERATORS for target in TARGETS}
    assert set(OPERATORS) <= set(aot.OPERATORS)


def test_nothing_spills(compiled: list[Compiled]) -> None:
    over = [row.line() for row in compiled if row.spills > (TREE_STACK if _joins_leaves(row) and row.target.startswith("cuda") else 16)]
    assert over == []


def test_products_are_groups_of_16_on_matrix_instructions(compiled: list[Compiled]) -> None:
    products = [row for row in compiled if row.multiplies]
    assert {row.target for row in products} == set(TARGETS)
    assert [row.line() for row in products if not row.matrix or not all(GROUP_OF_16.match(name) for name in row.matrix)] == []
    assert [row.line() for row in compiled if row.matrix and not row.multiplies] == []
    large = [row for row in products if row.target == "cuda:90" and "ROWS=128" in row.constants]
    assert large
    assert all(name.startswith("wgmma") for row in large for name in row.matrix)


FUSED, FLUSHED, APPROXIMATE = r"\bfma\.rn\.f32", r"\.ftz\b", r"\b(?:div|sqrt|rsqrt|rcp)\.(?:approx|full)"


@pytest.mark.parametrize("pattern", [FUSED, FLUSHED, APPROXIMATE])
def test_arithmetic_is_ieee_and_unfused(compiled: list[Compiled], pattern: str) -> None:
    assert [row.line() for row in compiled if row.target == "cuda:90" and re.search(pattern, row.text)] == []


def test_only_silu_takes_the_cards_exponential(compiled: list[Compiled]) -> None:
    users = {row.operator for row in compiled if re.search(r"\bex2\.approx|\bv_exp_f32", row.text)}
    assert users == set(EXPONENTIAL)
    assert {row.operator for row in compiled if "div.rn.f32" in row.text} == {"rms_norm", *EXPONENTIAL}
    assert {row.operator for row in compiled if "sqrt.rn.f32" in row.text} == {"rms_norm"}


# Controls: what the checks above look for can be found.


@triton.jit
def _fusible(x, y, z):
    at = tl.arange(0, 128)
    tl.store(z + at, tl.load(x + at) * tl.load(y + at) + tl.load(z + at))


@triton.jit
def _crowded(x, y, WIDTH: tl.constexpr):
    value = tl.load(x + tl.arange(0, WIDTH))
    tl.store(y + tl.arange(0, WIDTH), value * tl.max(row_tree(tl.reshape(value, (1, WIDTH))), 0))


def _planted(kernel: object, warps: int, **constants: int) -> Compiled:
    x = torch.empty(1 << 14, device="meta")
    with recorded("cuda") as launches:
        count = len(kernel.params) - len(constants)  # type: ignore[attr-defined]
        TritonSource("planted").launch(kernel, (1,), *[x] * count, op=None, warps=warps, **constants)
    return compile_launch(launches[0], "cuda:90")


def test_a_fused_sum_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not re.search(FUSED, _planted(_fusible, 1).text)
    monkeypatch.setitem(OPTIONS["cuda"], "enable_fp_fusion", True)
    assert re.search(FUSED, _planted(_fusible, 1).text)


def test_a_spill_would_be_seen() -> None:
    assert _planted(_crowded, 1, WIDTH=1 << 14).spills > TREE_STACK


def test_interpreted_indices_and_masks() -> None:
    script = Path(__file__).with_name("interpreted_operators.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("every index and mask is right\n")


@pytest.mark.parametrize("platform", ["cuda", "hip"])
def test_every_shape_has_a_tile(platform: str) -> None:
    for rows in (1, 16, 17, 64, 65, 128, 129, 512, 513, 1 << 20):
        for depth in (1, 16, 72, 512, 1536, 19072):
            for leaves in (1, 2, MOST_LEAVES, 2 * MOST_LEAVES):
                tile, whole = product_tile(platform, rows, 4096, depth, leaves)
                assert tile.depth % 16 == 0
                assert whole or leaves > 1
                assert not whole or leaves <= MOST_LEAVES
                assert not whole or leaves == 1 or depth % tile.depth == 0
    for describable in (True, False):
        assert token_tile(platform, describable).depth % 16 == 0


def test_kernel_ids_cover_source_and_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = TritonSource("silu").kernel_id
    assert before == TritonSource("silu").kernel_id
    assert re.fullmatch(r"triton:silu:[0-9a-f]{12}", before)
    assert before in declared_kernels()
    monkeypatch.setitem(OPTIONS["cuda"], "enable_fp_fusion", True)
    assert TritonSource("silu").kernel_id != before
    monkeypatch.undo()
    changed = TritonSource("silu")
    copy = tmp_path / "triton.py"
    copy.write_text(changed.files[0].read_text() + "\n")
    changed.files = (copy,)
    assert changed.kernel_id != before


def test_the_backend_needs_triton_and_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    with pytest.raises(BackendUnavailable, match="cannot run on device cpu"):
        rms_norm(x, x[0], 1e-6, backend="triton")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "rlk.kernels.silu.triton", raising=False)
    with pytest.raises(BackendUnavailable, match=r"silu: .*needs the triton package"):
        from_triton("silu", "silu")(x)


def test_recording_ends_with_its_block() -> None:
    with recorded("hip"):
        assert launch.platform() == "hip"
    assert launch.platform() == "cuda"


def test_an_example_that_waits_for_the_card_would_fail() -> None:
    reads: list[Callable[[torch.Tensor], object]] = [lambda x: x.tolist(), lambda x: int(x[0]), lambda x: bool(x.any())]
    for read in reads:
        with pytest.raises((NotImplementedError, RuntimeError)):
            read(torch.empty(4, device="meta"))
