"""Attention and logp without a card: compiled for sm_90 and gfx942, read as assembly, and interpreted for their indices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rlk.kernels._triton import aot
from rlk.kernels._triton.aot import Compiled, compile_all
from rlk.kernels.attention import triton as attention
from rlk.kernels.attention import triton_backward, triton_decode, triton_forward

OPERATORS = ("attention", "logp")
GROUP_OF_16 = re.compile(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+k16\.|mma\.sync\.aligned\.m16n8k16\.|v_mfma_f32_16x16x16_bf16$")
OUTER_STACK = 512
"""Bytes of stack of a kernel with a loop around its loop over keys or queries: what waits there, as the joined splits do."""


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    return list(compile_all(OPERATORS))


def test_every_kernel_compiles_for_both_targets(compiled: list[Compiled]) -> None:
    modules = {
        triton_forward: ("attention_forward", "attention_join"), triton_decode: ("attention_decode",),
        triton_backward: ("attention_delta", "attention_query_gradient", "attention_key_gradient"),
    }  # fmt: skip
    assert all(hasattr(module, name) for module, names in modules.items() for name in names)
    wanted = {name for names in modules.values() for name in names} | {"_tile_states", "_part", "_join", "_slopes"}
    for target in ("hip:gfx942", "cuda:90"):
        assert {row.kernel for row in compiled if row.target == target} == wanted
    assert {*OPERATORS, "batch_invariant_logp"} <= set(aot.OPERATORS)


def test_nothing_spills_but_what_waits_outside_the_inner_loop(compiled: list[Compiled]) -> None:
    outer = ("FOLD=True", "KIND=2", "gradient", "attention_decode")
    nested = [row for row in compiled if row.target == "cuda:90" and any(part in f"{row.kernel} {row.constants}" for part in outer)]
    assert len(nested) >= 2
    assert [row.line() for row in compiled if row.spills > (OUTER_STACK if row in nested else 16)] == []


def test_products_are_groups_of_16_on_matrix_instructions(compiled: list[Compiled]) -> None:
    products = [row for row in compiled if row.multiplies]
    names = {"attention_forward", "attention_decode", "attention_query_gradient", "attention_key_gradient"}
    assert {row.kernel for row in products} == names
    assert [row.line() for row in products if not row.matrix or not all(GROUP_OF_16.match(name) for name in row.matrix)] == []
    decode = [row for row in products if "BLOCK_M=16 " in row.constants and row.target == "cuda:90"]
    assert decode
    for row in products:
        if row.target == "cuda:90":
            assert all(name.startswith("mma.sync" if row in decode else "wgmma") for name in row.matrix), row.line()


def test_row_sums_of_probabilities_are_a_product_with_ones(compiled: list[Compiled]) -> None:
    forward = [row for row in compiled if row.kernel == "attention_forward" and row.target == "cuda:90" and "FOLD=True" in row.constants]
    assert forward
    assert all(any("m64n16k16" in name for name in row.matrix) for row in forward)


@pytest.mark.parametrize("pattern", [r"\.ftz\b", r"\b(?:div|sqrt|rsqrt|rcp)\.(?:approx|full)"])
def test_arithmetic_is_ieee(compiled: list[Compiled], pattern: str) -> None:
    assert [row.line() for row in compiled if row.target == "cuda:90" and re.search(pattern, row.text)] == []


def test_no_sum_is_fused(compiled: list[Compiled]) -> None:
    """Only the card's logarithm, a polynomial, has multiply-adds of its own; it runs once a row."""
    fused = {row.kernel for row in compiled if row.target == "cuda:90" and "fma.rn.f32" in row.text}
    logarithms = {row.kernel for row in compiled if "STORE_LSE=True" in row.constants or "WHOLE=True" in row.constants}
    assert fused <= logarithms | {"_join"}


@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("states", [1, 16, 17, 64, 65, 4096])
def test_every_shape_has_a_tile(states: int, dim: int) -> None:
    for tile in (16, 64, attention.LARGEST_TILE):
        chosen = attention.forward_tiles(states, tile, dim)
        assert chosen.m in (16, 64, 128)
        assert chosen.n == tile
    assert attention.query_gradient_tiles(dim).n % 16 == 0
    assert attention.key_gradient_tiles(dim).m % 16 == 0


def test_sizes_that_no_tile_holds_are_refused() -> None:
    with torch.device("meta"):
        q, offsets = torch.empty(8, 2, 512, dtype=torch.bfloat16), torch.empty(2, dtype=torch.int64)
        with pytest.raises(ValueError, match="head dimension 512 must be at most"):
            attention.run_attention(q, q, q, offsets, 1.0, 64, 64)
        with pytest.raises(ValueError, match="kv_tile=256"):
            attention.run_attention(q[..., :64], q[..., :64], q[..., :64], offsets, 1.0, 256, 256)


def test_interpreted_indices_and_masks() -> None:
    script = Path(__file__).with_name("interpreted_attention.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("every index and mask is right\n")
