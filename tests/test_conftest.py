"""The shared checks fire: each kind of dependence on layout that they look for is planted and caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlk.contract.judgments import FORWARD_ACCURACY
from rlk.contract.workloads import WS1

Check = Callable[..., None]
ROWS = torch.randn(WS1.packed, 24, generator=torch.Generator().manual_seed(5)).bfloat16()


def test_checks_accept_functions_without_a_fault(assert_rows_invariant: Check, assert_leaves_invariant: Check) -> None:
    assert_rows_invariant(lambda x: x * 2, ROWS)
    assert_leaves_invariant(lambda x, index, offsets: torch.zeros(24), ROWS)


@pytest.mark.parametrize(
    ("fault", "run"),
    [
        ("chunks of 1", lambda x: x + len(x)),
        ("permutation", lambda x: x + (len(x) == WS1.packed and not torch.equal(x, ROWS))),
        ("row 0 among 257", lambda x: x + (len(x) == 257)),
        ("padding_left", lambda x: x + x.sum() * 0),
        ("moved by 3", lambda x: x + (len(x) == WS1.packed + 3)),
        ("3 threads", lambda x: x + (torch.get_num_threads() == 3)),
    ],
)
def test_a_row_that_depends_on_its_layout_is_caught(assert_rows_invariant: Check, fault: str, run: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(AssertionError, match=fault):
        assert_rows_invariant(run, ROWS)


def test_a_changed_sign_of_zero_is_caught(assert_rows_invariant: Check) -> None:
    with pytest.raises(AssertionError, match="row 0 among 31"):
        assert_rows_invariant(lambda x: torch.zeros_like(x) * (-1 if len(x) == 31 else 1), ROWS)


@pytest.mark.parametrize(
    ("fault", "run"),
    [
        ("permutation", lambda x, index, offsets: x.float()[:1].clone()),
        ("padding_left", lambda x, index, offsets: x.float().sum(0) * 0),
        ("cp=2", lambda x, index, offsets: torch.ones(24)),
        ("5 threads", lambda x, index, offsets: torch.full((24,), float(torch.get_num_threads() == 5))),
    ],
)
def test_a_weight_gradient_that_depends_on_its_layout_is_caught(
    assert_leaves_invariant: Check, fault: str, run: Callable[..., torch.Tensor]
) -> None:
    with pytest.raises(AssertionError, match=fault):
        assert_leaves_invariant(run, ROWS)


def test_an_inaccurate_element_is_caught(assert_accurate: Check) -> None:
    assert_accurate("silu", FORWARD_ACCURACY, torch.tensor([1.035]), torch.tensor([1.0]))
    for wrong in (1.037, float("nan")):
        with pytest.raises(AssertionError):
            assert_accurate("silu", FORWARD_ACCURACY, torch.tensor([wrong]), torch.tensor([1.0]))
