"""rms_norm: accuracy against its specification, invariance, gradients."""

from __future__ import annotations

import torch

from rlk.kernels.rms_norm import reference, rms_norm, rms_norm_gamma_grad

EPS = 1e-6


def _inputs(rows: int = 37, width: int = 96) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    make = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()
    return make(rows, width), make(width), make(rows, width)


def test_forward_is_accurate() -> None:
    x, gamma, _ = _inputs()
    torch.testing.assert_close(rms_norm(x, gamma, EPS).float(), reference.rms_norm(x, gamma, EPS), atol=2e-2, rtol=1.6e-2)


def test_row_does_not_depend_on_its_neighbours() -> None:
    x, gamma, dy = _inputs()
    whole = rms_norm(x, gamma, EPS)
    for row in range(x.shape[0]):
        assert torch.equal(rms_norm(x[row : row + 1], gamma, EPS).view(torch.int16), whole[row : row + 1].view(torch.int16))


def test_gradients_are_accurate() -> None:
    x, gamma, dy = _inputs()
    leaf = x.clone().requires_grad_()
    rms_norm(leaf, gamma, EPS).backward(dy)
    x32, gamma32 = x.float().requires_grad_(), gamma.float().requires_grad_()
    reference.rms_norm(x32, gamma32, EPS).backward(dy.float())
    torch.testing.assert_close(leaf.grad.float(), x32.grad, atol=5e-2, rtol=2e-2)
    index = torch.arange(x.shape[0])
    dgamma = rms_norm_gamma_grad(x, dy, EPS, index, torch.tensor([0, x.shape[0]]))
    torch.testing.assert_close(dgamma, gamma32.grad, atol=1e-1, rtol=2e-2)
