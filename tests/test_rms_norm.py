"""rms_norm: the written order to the byte, accuracy, gradients, invariance, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlk.contract.judgments import FORWARD_ACCURACY, GRADIENT_ACCURACY
from rlk.contract.orders import fold_halves, fold_pairs
from rlk.contract.topology import token_leaves
from rlk.contract.workloads import WS1
from rlk.kernels.dispatch import BackendUnavailable, readback, reset_readback
from rlk.kernels.rms_norm import reference, rms_norm, rms_norm_gamma_grad

Check = Callable[..., None]
EPS = 1e-6
LEAVES = token_leaves(WS1.lengths)
INDEX, OFFSETS = torch.tensor(LEAVES.index), torch.tensor(LEAVES.offsets)
ZERO = torch.zeros(())


def _inputs(rows: int = WS1.packed, width: int = 96) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    make = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()
    return make(rows, width), make(width), make(rows, width)


def _both_ways(x: torch.Tensor, gamma: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = rms_norm(leaf, gamma, EPS)
    y.backward(dy)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def _exact_gradients(x: torch.Tensor, gamma: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x32, gamma32 = x.float().requires_grad_(), gamma.float().requires_grad_()
    reference.rms_norm(x32, gamma32, EPS).backward(dy.float())
    assert x32.grad is not None
    assert gamma32.grad is not None
    return x32.grad, gamma32.grad


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    view = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(view), b.contiguous().view(view))


# The order of the contract again, in torch's elementwise operators.


def _row_tree(values: torch.Tensor) -> torch.Tensor:
    return fold_halves(list(values.unbind(-1)), torch.add, ZERO)[..., None]


def _x_hat(x: torch.Tensor) -> torch.Tensor:
    x = x.float()
    return x * (1 / (_row_tree(x * x) / x.shape[-1] + EPS).sqrt())


@pytest.mark.parametrize("width", [1, 2, 5, 96, 128])
def test_forward_follows_the_written_order(width: int) -> None:
    x, gamma, _ = _inputs(width=width)
    assert _same(rms_norm(x, gamma, EPS), (_x_hat(x).bfloat16().float() * gamma.float()).bfloat16())


@pytest.mark.parametrize("width", [5, 96, 128])
def test_gradient_follows_the_written_order(width: int) -> None:
    x, gamma, dy = _inputs(width=width)
    x_hat = _x_hat(x)
    rstd = 1 / (_row_tree(x.float() * x.float()) / width + EPS).sqrt()
    scaled = gamma.float() * dy.float()
    dx = rstd * (scaled - x_hat * (_row_tree(scaled * x_hat) / width))
    assert _same(_both_ways(x, gamma, dy)[1], dx.bfloat16())


def test_gamma_gradient_follows_token_order() -> None:
    x, _, dy = _inputs()
    terms = torch.cat((dy.float() * _x_hat(x).bfloat16().float(), torch.zeros(1, x.shape[1])))[INDEX]  # the row of index -1 is +0
    leaves = []
    for first, last in zip(LEAVES.offsets, LEAVES.offsets[1:]):
        total = torch.zeros(x.shape[1])
        for at in range(first, last, 16):
            total = total + fold_halves(list(terms[at : at + 16]), torch.add, ZERO)
        leaves.append(total)
    assert _same(rms_norm_gamma_grad(x, dy, EPS, INDEX, OFFSETS), fold_pairs(leaves, torch.add))


def test_rounding_after_the_weight_is_another_norm() -> None:
    """A norm that multiplies the unrounded x̂ by gamma differs in about a quarter of the elements."""
    x, gamma, _ = _inputs(rows=64, width=128)
    late = (_x_hat(x) * gamma.float()).bfloat16()
    assert 0.15 < float((late != rms_norm(x, gamma, EPS)).float().mean()) < 0.4


def test_another_order_of_the_row_sum_is_seen() -> None:
    x, gamma, _ = _inputs(rows=2000)
    squares = x.float() * x.float()
    ascending = squares[:, 0]
    for i in range(1, x.shape[1]):
        ascending = ascending + squares[:, i]
    y = (x.float() * (1 / (ascending[:, None] / x.shape[1] + EPS).sqrt())).bfloat16().float() * gamma.float()
    assert not _same(rms_norm(x, gamma, EPS), y.bfloat16())


def test_forward_is_accurate(assert_accurate: Check) -> None:
    x, gamma, _ = _inputs()
    assert_accurate("rms_norm", FORWARD_ACCURACY, rms_norm(x, gamma, EPS), reference.rms_norm(x, gamma, EPS))


def test_gradients_are_accurate(assert_accurate: Check) -> None:
    x, gamma, dy = _inputs()
    dx, dgamma = _exact_gradients(x, gamma, dy)
    assert_accurate("rms_norm", GRADIENT_ACCURACY, _both_ways(x, gamma, dy)[1], dx)
    assert_accurate("rms_norm", GRADIENT_ACCURACY, rms_norm_gamma_grad(x, dy, EPS, INDEX, OFFSETS), dgamma)


def test_rows_and_their_gradients_are_invariant(assert_rows_invariant: Check) -> None:
    x, gamma, dy = _inputs()
    assert_rows_invariant(lambda x, dy: _both_ways(x, gamma, dy), x, dy)


def test_gamma_gradient_is_invariant(assert_leaves_invariant: Check) -> None:
    x, _, dy = _inputs()
    assert_leaves_invariant(lambda x, dy, index, offsets: rms_norm_gamma_grad(x, dy, EPS, index, offsets), x, dy)


def test_gamma_gradient_of_a_rank_without_tokens_is_zero() -> None:
    x, _, dy = _inputs(rows=3)
    empty = rms_norm_gamma_grad(x, dy, EPS, torch.full((16,), -1), torch.tensor([0, 0, 16]))
    assert _same(empty, torch.zeros(x.shape[1]))


def test_leading_dimensions_are_rows() -> None:
    x, gamma, _ = _inputs(rows=12)
    assert _same(rms_norm(x.reshape(3, 4, -1), gamma, EPS), rms_norm(x, gamma, EPS).reshape(3, 4, -1))
    assert rms_norm(x[:0], gamma, EPS).shape == (0, x.shape[1])


def test_strided_input_is_read_by_value() -> None:
    x, gamma, _ = _inputs(rows=24)
    assert _same(rms_norm(x[::2], gamma, EPS), rms_norm(x[::2].contiguous(), gamma, EPS))
    assert _same(rms_norm(x.T.contiguous().T, gamma, EPS), rms_norm(x, gamma, EPS))


def test_wrong_arguments_are_refused() -> None:
    x, gamma, dy = _inputs()
    for arguments in ((x.float(), gamma), (x, gamma.float()), (x, gamma[1:])):
        with pytest.raises(ValueError, match="rms_norm: "):
            rms_norm(*arguments, EPS)
    wrong = [(x.float(), dy, INDEX, OFFSETS), (x, dy[1:], INDEX, OFFSETS), (x, dy, INDEX.int(), OFFSETS), (x, dy, INDEX, OFFSETS[:-1])]
    wrong += [(x[:10], dy[:10], INDEX, OFFSETS), (x, dy, INDEX - 1, OFFSETS), (x, dy, INDEX, OFFSETS.flip(0)), (x, dy, INDEX, OFFSETS + 1)]
    for rows, grad, index, offsets in wrong:
        with pytest.raises(ValueError, match="rms_norm_gamma_grad: "):
            rms_norm_gamma_grad(rows, grad, EPS, index, offsets)
    with pytest.raises(BackendUnavailable):
        rms_norm(x, gamma, EPS, backend="triton")


def test_what_ran_is_read_back() -> None:
    x, gamma, dy = _inputs()
    reset_readback()
    _both_ways(x, gamma, dy)
    rms_norm_gamma_grad(x, dy, EPS, INDEX, OFFSETS)
    assert [(ran.op, ran.backend, ran.calls) for ran in readback()] == [
        ("rms_norm", "cpu", 1),
        ("rms_norm.backward", "cpu", 1),
        ("rms_norm.gamma_grad", "cpu", 1),
    ]


def test_operator_is_well_registered() -> None:
    x, gamma, _ = _inputs()
    torch.library.opcheck(torch.ops.rlk.rms_norm, (x.requires_grad_(), gamma, EPS))
