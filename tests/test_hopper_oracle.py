"""The oracle of Hopper's matrix instruction: by hand, against exact fractions, and against bytes recorded on a card."""

from __future__ import annotations

import itertools
import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk.acceptance.validate import KERNEL_ID
from rlk.contract.orders import fold_pairs
from rlk.contract.topology import token_leaves
from rlk.kernels.det_gemm import hopper
from rlk.kernels.det_gemm.hopper_probes import FAMILIES, GOLDEN, Family, Golden, accumulators, digest, operands

RECORD = Path(__file__).parents[1] / "benchmarks" / "results" / "hopper_golden.json"
NAN, INFINITY = 0x7FC00000, 0x7F800000


def _bits(values: torch.Tensor) -> list[int]:
    kind, size = (torch.int16, 1 << 16) if values.element_size() == 2 else (torch.int32, 1 << 32)
    return [bits % size for bits in values.contiguous().view(kind).flatten().tolist()]


def _fp32(bits: int) -> float:
    return torch.tensor([bits - (bits >> 31 << 32)], dtype=torch.int32).view(torch.float32).item()


def _step(c: float, *products: tuple[float, float]) -> int:
    """Bits of c + the products, by one instruction."""
    a, b = torch.zeros(1, 16), torch.zeros(1, 16)
    for k, (left, right) in enumerate(products):
        a[0, k], b[0, k] = left, right
    assert all(bool((m.isnan() | (m.bfloat16().float() == m)).all()) for m in (a, b))
    return _bits(hopper.step(a.bfloat16(), b.bfloat16(), torch.tensor([c])))[0]


def _same(bits: int, value: float) -> bool:
    return bits == _bits(torch.tensor([value]))[0]


@pytest.mark.parametrize(
    ("c", "products", "expected"),
    [
        (1.0, [(2.0, 3.0), (-0.5, 4.0)], 5.0),
        (0.0, [(1.0, 2**-12)] * 16, 2**-8),
        # 25 fraction bits below the largest exponent: 2^-25 is kept beside 1, 2^-26 is not
        (1.0, [(1.0, 2**-25)] * 16, 1 + 2**-21),
        (1.0, [(1.0, 2**-26)] * 16, 1.0),
        (1.0, [(1.0, 1.5 * 2**-25)] * 16, 1 + 2**-21),
        # C is aligned like any other term
        (2**-25, [(1.0, 1.0), (-1.0, 1.0)], 2**-25),
        (2**-26, [(1.0, 1.0), (-1.0, 1.0)], 0.0),
        # each term is cut towards zero, whatever its sign
        (1.0, [(-1.0, 2**-26)] * 16, 1.0),
        (-1.0, [(1.0, 1.5 * 2**-25)] * 16, -1 + 2**-21),
        # the sum too: 1 + 2^-24 and its half-way neighbour lose their last bit
        (1.0, [(1.0, 2**-24)], 1.0),
        (1.0, [(3.0, 2**-24)], 1 + 2**-23),
        (-1.0, [(-3.0, 2**-24)], -1 - 2**-23),
        # no product is normalised: 1.5·1.5 = 2.25 has exponent 0, so 2^-25 is kept beside it; C = 2.25 has exponent 1
        (0.0, [(1.5, 1.5), (-1.5, 1.5), (1.0, 2**-25)], 2**-25),
        (2.25, [(-1.5, 1.5), (1.0, 2**-25)], 0.0),
        # a zero has no exponent, however large its partner
        (2**-20, [(0.0, 2.0**120)], 2**-20),
        (2**-20, [(-0.0, 2.0**120), (1.0, 1.0)], 1.0 + 2**-20),
    ],
)  # fmt: skip
def test_by_hand(c: float, products: list[tuple[float, float]], expected: float) -> None:
    assert _same(_step(c, *products), expected)


def test_no_sum_is_minus_zero() -> None:
    assert _step(-0.0) == 0
    assert _step(-0.0, (-1.0, 0.0)) == 0
    assert _step(-(2.0**-20), (1.0, 2**-20)) == 0
    assert _step(0.0, (-(2.0**-75), 2.0**-76)) == 0  # a negative sum below the smallest subnormal


def test_subnormals_are_neither_flushed_nor_rounded() -> None:
    smallest = 2.0**-149
    assert _step(smallest) == 1
    assert _step(0.0, (2.0**-75, 2.0**-74)) == 1
    assert _step(0.0, (2.0**-133, 1.0)) == 1 << 16  # the smallest bf16
    assert _step(0.0, (2.0**-133, 2.0**-16)) == 1
    assert _step(0.0, *[(2.0**-75, 2.0**-75)] * 16) == 8
    assert _step(0.0, *[(2.0**-76, 2.0**-76)] * 16) == 2  # C = 0 has no exponent
    assert _step(smallest, *[(2.0**-76, 2.0**-76)] * 16) == 1  # the smallest has -126, and 2^-152 is below its 25 fraction bits


@pytest.mark.parametrize(("last", "expected"), [(-157, 1), (-158, 1), (-159, 0), (-160, 0)])
def test_the_largest_exponent_counts_as_at_least_minus_133(last: int, expected: int) -> None:
    """2^-150 + 2^-151 + … + 2^last and 2^last once more are 2^-149, if all of them are kept."""
    ones = [(2.0**-75, 2.0 ** (exponent + 75)) for exponent in range(-150, last - 1, -1)]
    assert _step(0.0, *ones, ones[-1]) == expected
    assert _step(0.0, *ones) == 0


def test_overflow_is_infinite_and_finite_sums_of_huge_terms_are_not() -> None:
    assert _step(0.0, (2.0**64, 2.0**64)) == INFINITY
    assert _step(0.0, (-(2.0**64), 2.0**64)) == INFINITY | 1 << 31
    assert _same(_step(1.0, (2.0**100, 2.0**100), (-(2.0**100), 2.0**100)), 0.0)
    assert _step(0.0, (1.9921875 * 2.0**63, 1.9921875 * 2.0**63)) == _bits(torch.tensor([1.9921875**2 * 2.0**126]))[0]
    assert _step(_fp32(0x7F7FFFFF), (2.0**63, 2.0**38)) == 0x7F7FFFFF  # below the last place


def test_nan_and_infinities() -> None:
    assert _step(math.inf) == INFINITY
    assert _step(1.0, (-math.inf, 2.0)) == INFINITY | 1 << 31
    assert _step(math.inf, (-math.inf, 2.0)) == NAN
    assert _step(0.0, (math.inf, 0.0)) == NAN
    assert _step(math.nan) == NAN
    assert _step(0.0, (math.nan, 0.0)) == NAN


def _exponent(value: float) -> int:
    """Exponent of a bf16 or fp32 value that is not 0; -126 for subnormals."""
    return max(math.frexp(value)[1] - 1, -126)


def _cut(value: Fraction, exponent: int, places: int) -> Fraction:
    unit = Fraction(2) ** (exponent - places)
    return math.trunc(value / unit) * unit


def _fractions(a: list[float], b: list[float], c: float) -> float:
    """The rule of one instruction, written over fractions."""
    terms = [(Fraction(x) * Fraction(y), _exponent(x) + _exponent(y)) for x, y in zip((c, *a), (1.0, *b)) if x and y]
    largest = max([exponent for _, exponent in terms] + [-133])
    total = sum((_cut(value, largest, 25) for value, _ in terms), Fraction(0))
    if total == 0:
        return 0.0
    rounded = _cut(total, _exponent(float(total)), 23)
    return float(rounded) if abs(rounded) < 2**128 else math.copysign(math.inf, rounded)


@pytest.mark.parametrize("family", [f for f in FAMILIES if not f.special], ids=lambda f: f.name)
def test_steps_are_the_rule_over_fractions(family: Family) -> None:
    a, b = operands(family, 7, 60, 60, 16)
    c = accumulators(family, 7, 60)
    found = hopper.step(a, b, c)
    expected = [_fractions(x, y, z) for x, y, z in zip(a.tolist(), b.tolist(), c.tolist())]
    assert _bits(found) == _bits(torch.tensor(expected))


def test_a_chain_is_one_step_after_another() -> None:
    x, w = operands(FAMILIES[1], 8, 5, 19, 72)
    total = torch.zeros(5 * 19)
    for first in range(0, 72, 16):
        a, b = (torch.nn.functional.pad(m[:, first : first + 16], (0, max(0, first + 16 - 72))) for m in (x, w))
        total = hopper.step(a.repeat_interleave(19, 0), b.repeat(5, 1), total)
    assert _bits(hopper.det_gemm(x, w, 1, torch.float32)) == _bits(total)


def test_leaves_are_joined_by_pairs_and_rounded_once() -> None:
    x, w = operands(FAMILIES[2], 9, 7, 21, 512)
    parts = [hopper.det_gemm(x[:, i : i + 64], w[:, i : i + 64], 1, torch.float32) for i in range(0, 512, 64)]
    total = fold_pairs(parts, torch.add)
    assert _bits(hopper.det_gemm(x, w, 8, torch.float32)) == _bits(total)
    assert _bits(hopper.det_gemm(x, w, 8)) == _bits(total.bfloat16())
    assert not torch.equal(total, hopper.det_gemm(x, w, 1, torch.float32))


def test_no_element_depends_on_its_neighbours() -> None:
    x, w = operands(FAMILIES[1], 10, 70, 33, 128)
    whole = hopper.det_gemm(x, w)
    for row, column in itertools.product((0, 63, 64, 69), (0, 15, 16, 32)):
        assert torch.equal(hopper.det_gemm(x[row : row + 1], w[column : column + 1]), whole[row : row + 1, column : column + 1])


def test_the_order_inside_a_group_plays_no_part_and_group_edges_do() -> None:
    x, w = operands(FAMILIES[1], 11, 9, 40, 128)
    within = torch.arange(128).view(8, 16).flip(1).flatten()
    assert torch.equal(hopper.det_gemm(x[:, within], w[:, within], 1, torch.float32), hopper.det_gemm(x, w, 1, torch.float32))
    shifted_x, shifted_w = (torch.nn.functional.pad(m, (1, 15)) for m in (x, w))
    assert not torch.equal(hopper.det_gemm(shifted_x, shifted_w, 1, torch.float32), hopper.det_gemm(x, w, 1, torch.float32))


def test_weight_gradients_are_in_token_order() -> None:
    lengths = (11, 16, 13, 19)
    leaves = token_leaves(lengths)
    dy, x = (m.T.contiguous() for m in operands(FAMILIES[0], 12, 10, 18, sum(lengths)))
    parts = []
    for first, last in itertools.pairwise(leaves.offsets):
        named = leaves.index[first:last]
        a, b = (torch.stack([m[i] if i >= 0 else torch.zeros_like(m[0]) for i in named]).T for m in (dy, x))
        parts.append(hopper.det_gemm(a, b, 1, torch.float32))
    found = hopper.det_gemm_weight_grad(x, dy, torch.tensor(leaves.index), torch.tensor(leaves.offsets))
    assert _bits(found) == _bits(fold_pairs(parts, torch.add))


def test_refusals() -> None:
    x, w = torch.zeros(2, 32).bfloat16(), torch.zeros(3, 32).bfloat16()
    with pytest.raises(ValueError, match="must be bf16"):
        hopper.det_gemm(x.float(), w)
    with pytest.raises(ValueError, match="power of two that divides 32"):
        hopper.det_gemm(x, w, 3)


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def test_the_record_says_where_it_was_made_and_holds_every_case(record: dict[str, Any]) -> None:
    assert "H200" in record["card"]
    assert record["kernels"]
    assert all(KERNEL_ID.fullmatch(kernel) and ":det_gemm:" in kernel for kernel in record["kernels"])
    assert list(record["cases"]) == [case.name for case in GOLDEN]
    assert len({case["sha256"] for case in record["cases"].values()}) == len(GOLDEN)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case.name)
def test_the_oracle_gives_the_bytes_of_the_card(case: Golden, record: dict[str, Any]) -> None:
    found, kept = case.oracle(), record["cases"][case.name]
    assert _bits(found[0]) == [int(bits, 16) for bits in kept["first_row"]]
    assert digest(found) == kept["sha256"]
