"""silu: accuracy, one rounding, special values, invariance, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlk.contract.judgments import FORWARD_ACCURACY, GRADIENT_ACCURACY
from rlk.contract.workloads import WS1
from rlk.kernels.dispatch import BackendUnavailable, readback, reset_readback
from rlk.kernels.silu import reference, silu

Check = Callable[..., None]


def _inputs(rows: int = WS1.packed, width: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(13)
    return (3 * torch.randn(rows, width, generator=generator)).bfloat16(), torch.randn(rows, width, generator=generator).bfloat16()


def _both_ways(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = silu(leaf)
    y.backward(dy)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def _exact_gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    leaf = x.float().requires_grad_()
    reference.silu(leaf).backward(dy.float())
    assert leaf.grad is not None
    return leaf.grad


def test_forward_and_gradient_are_accurate(assert_accurate: Check) -> None:
    x, dy = _inputs()
    y, dx = _both_ways(x, dy)
    assert_accurate("silu", FORWARD_ACCURACY, y, reference.silu(x))
    assert_accurate("silu", GRADIENT_ACCURACY, dx, _exact_gradient(x, dy))


def test_every_bf16_value_is_rounded_once() -> None:
    """Over all finite bf16 inputs the result is the nearest bf16 value to the exact one, but for a few near ties."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite() & (x > -80)]
    exact = x.double() * torch.sigmoid(x.double())
    y = silu(x)
    assert float((y != exact.bfloat16()).float().mean()) < 2e-3
    twice = (x * torch.sigmoid(x.float()).bfloat16()).bfloat16()
    assert float((twice != exact.bfloat16()).float().mean()) > 0.01


def test_special_values() -> None:
    x = torch.tensor([0.0, -0.0, 1e30, -1e30, -200.0, float("inf"), 4e-40, -4e-40]).bfloat16()
    expected = torch.tensor([0.0, -0.0, 1e30, -0.0, -0.0, float("inf"), 2e-40, -2e-40]).bfloat16()
    y, dx = _both_ways(x, torch.ones_like(x))
    assert y.view(torch.int16).tolist() == expected.view(torch.int16).tolist()
    assert dx[:5].tolist() == [0.5, 0.5, 1.0, 0.0, 0.0]
    assert silu(torch.tensor([float("nan")]).bfloat16()).isnan().all()


def test_rows_and_their_gradients_are_invariant(assert_rows_invariant: Check) -> None:
    assert_rows_invariant(_both_ways, *_inputs())


def test_value_does_not_depend_on_alignment() -> None:
    """The vector body and the tail of a loop agree: any start and length of a vector keeps its bytes."""
    x = _inputs()[0].flatten()[:80]
    whole = silu(x)
    for begin in range(33):
        for end in range(begin + 1, 81, 5):
            assert torch.equal(silu(x[begin:end]).view(torch.int16), whole[begin:end].view(torch.int16))


def test_wrong_arguments_are_refused() -> None:
    x, _ = _inputs()
    with pytest.raises(ValueError, match="silu: "):
        silu(x.float())
    with pytest.raises(BackendUnavailable):
        silu(x, backend="vendor")


def test_what_ran_is_read_back() -> None:
    reset_readback()
    _both_ways(*_inputs())
    assert [(ran.op, ran.backend, ran.calls) for ran in readback()] == [("silu", "cpu", 1), ("silu.backward", "cpu", 1)]


def test_operator_is_well_registered() -> None:
    torch.library.opcheck(torch.ops.rlk.silu, (_inputs()[0].requires_grad_(),))
