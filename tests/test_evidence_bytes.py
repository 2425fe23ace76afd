"""The byte comparator sees every byte, and nothing that was not compared counts as equal."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rlk.evidence.bytes import compare, compare_fp32, compare_tokens, describe
from rlk.evidence.schema import Comparison

FLOATS = {torch.float32: np.uint32, torch.float64: np.uint64, torch.float16: np.uint16, torch.bfloat16: np.uint16}
TOKENS = [(0, 0), (0, 1), (3, 0), (3, 1)]


def test_equal_tensors_of_any_layout_are_equal() -> None:
    a = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    for actual, expected in ((a, a.clone()), (a.t(), a.t().contiguous()), (a[::2], a.clone()[::2]), (a[0, 0], a[0, 0].clone())):
        outcome = compare("x", actual, expected)
        assert (outcome.equal, outcome.elements, outcome.mismatched_bytes, outcome.first) == (True, actual.numel(), 0, None)


@pytest.mark.parametrize("dtype", FLOATS)
@settings(max_examples=60)
@given(data=st.data())
def test_every_flipped_bit_of_every_float_is_seen(dtype: torch.dtype, data: st.DataObject) -> None:
    bits = 8 * torch.empty((), dtype=dtype).element_size()
    value = data.draw(st.floats(-6e4, 6e4, width=16))
    element, bit = data.draw(st.integers(0, 4)), data.draw(st.integers(0, bits - 1))
    a = torch.full((5,), value, dtype=dtype)
    b = a.clone()
    raw = b.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[bits]).numpy().view(FLOATS[dtype])
    raw[element] ^= FLOATS[dtype](1 << bit)
    outcome = compare("x", a, b)
    assert not outcome.equal
    assert outcome.mismatched_elements == outcome.mismatched_bytes == 1
    assert outcome.first is not None
    assert outcome.first.index == (element,)
    assert int(outcome.first.actual_hex, 16) ^ int(outcome.first.expected_hex, 16) == 1 << bit


@pytest.mark.parametrize(
    ("a", "b", "ulp"),
    [(0.0, -0.0, 1), (1.0, np.nextafter(np.float32(1), np.float32(2)), 1), (-1e-45, 1e-45, 3), (1.0, 2.0, 1 << 23), (-1.0, -2.0, 1 << 23)],
)
def test_ulp_distance(a: float, b: float, ulp: int) -> None:
    outcome = compare_fp32("x", [a], [float(b)])
    assert (outcome.first and outcome.first.ulp, outcome.max_ulp) == (ulp, ulp)


def test_signs_far_apart_in_fp64_do_not_wrap() -> None:
    outcome = compare("x", torch.tensor([-1.7e308], dtype=torch.float64), torch.tensor([1.7e308], dtype=torch.float64))
    assert outcome.max_ulp is not None
    assert outcome.max_ulp > 1 << 63


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_other_dtypes(dtype: torch.dtype) -> None:
    a, b = torch.tensor([1.0, 0.0]).to(dtype), torch.tensor([1.0, 1.0]).to(dtype)
    assert compare("x", a, a.clone()).equal
    assert compare("x", a, b).mismatched_elements == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_void_a_comparison(value: float) -> None:
    for a, b in (([value, 1.0], [1.0, 1.0]), ([1.0, 1.0], [value, 1.0]), ([value, 1.0], [value, 1.0])):
        assert "NaN or Inf" in compare_fp32("x", a, b).problem
    assert "NaN or Inf" in compare("x", torch.tensor([complex(1, value)]), torch.tensor([complex(1, value)])).problem


def test_lazy_negation_and_conjugation_are_carried_out() -> None:
    z = torch.tensor([1 + 2j, 3 + 4j])
    assert compare("x", z.conj(), torch.tensor([1 - 2j, 3 - 4j])).equal
    assert compare("x", z.conj().imag, torch.tensor([-2.0, -4.0])).equal
    assert not compare("x", z.conj().imag, torch.tensor([2.0, 4.0])).equal


@pytest.mark.parametrize(
    ("actual", "expected", "problem"),
    [
        (torch.ones(2, 3), torch.ones(3, 2), "shape (2, 3) against (3, 2)"),
        (torch.ones(2, 1), torch.ones(2), "shape (2, 1) against (2,)"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype float32 against float64"),
        (torch.ones(2, dtype=torch.int32), torch.ones(2), "dtype int32 against float32"),
        (torch.ones(0, 4), torch.ones(0, 4), "no element"),
    ],
)
def test_what_cannot_be_compared_is_a_problem(actual: torch.Tensor, expected: torch.Tensor, problem: str) -> None:
    outcome = compare("x", actual, expected)
    assert problem in outcome.problem
    assert (outcome.equal, outcome.elements) == (False, 0)
    assert describe(outcome).startswith("x: ")


def test_a_value_is_not_compared_with_itself() -> None:
    a = torch.ones(4)
    assert "same memory" in compare("x", a, a).problem
    assert "same memory" in compare("x", a, a.view(4)).problem
    assert compare("x", a[:2], a[2:]).equal


def test_tokens_are_aligned_by_sample_and_position() -> None:
    rows = torch.arange(8.0).view(4, 2)
    order = [2, 0, 3, 1]
    permuted = [TOKENS[i] for i in order]
    assert compare_tokens("x", permuted, rows[order], TOKENS, rows).equal
    changed = rows[order].clone()
    changed[order.index(3), 1] += 1
    outcome = compare_tokens("x", permuted, changed, TOKENS, rows)
    assert outcome.first is not None
    assert outcome.first.index == (3, 1, 1)


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        ([(0, 0), (0, 1), (3, 0)], "4 rows for 3 tokens"),
        ([(0, 0), (0, 1), (3, 0), (3, 0)], "sample 3 position 0 is twice"),
        ([(0, 0), (0, 1), (3, 0), (3, 2)], "1 tokens are missing on the actual side, first sample 3 position 1"),
    ],
)
def test_tokens_that_do_not_match_are_a_problem(tokens: list[tuple[int, int]], problem: str) -> None:
    outcome = compare_tokens("x", tokens, torch.ones(4), TOKENS, torch.ones(4))
    assert problem in outcome.problem
    assert not outcome.equal


@pytest.mark.parametrize(
    "change",
    [
        {"elements": 3},
        {"shape": (0,), "elements": 0},
        {"mismatched_bytes": 1},
        {"mismatched_elements": 1},
        {"mismatched_elements": 5, "mismatched_bytes": 5},
        {"elements": -1},
        {"unknown": 1},
    ],
)
def test_a_comparison_that_contradicts_itself_is_refused(change: dict[str, object]) -> None:
    whole = compare_fp32("x", [1.0] * 4, [1.0] * 4).model_dump()
    assert Comparison.model_validate(whole).equal
    with pytest.raises(ValidationError):
        Comparison.model_validate(whole | change)
