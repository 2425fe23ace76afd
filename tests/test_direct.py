"""Operators that are called past torch.library: gradients, and what is not promised."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from rlk.kernels.det_gemm import cpu as det_gemm
from rlk.kernels.det_gemm.operators import register_device
from rlk.kernels.direct import differentiable
from rlk.kernels.logp import cpu as logp
from rlk.kernels.qk_norm import cpu as qk_norm
from rlk.kernels.rms_norm import cpu as rms_norm
from rlk.kernels.rope import cpu as rope
from rlk.kernels.swiglu import cpu as swiglu

G = torch.Generator().manual_seed(3)
X = torch.randn(5, 64, generator=G).bfloat16()
HEADS = torch.randn(5, 4, 16, generator=G).bfloat16()
TABLE = torch.randn(2, 9, 8, generator=G)
LOGITS = torch.randn(5, 40, generator=G)
IDS, ONES = torch.tensor([3, 0, 39, 7, 12]), torch.ones(5)

CASES: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "rms_norm": (
        rms_norm.rms_norm,
        (rms_norm.setup, partial(rms_norm.backward, rms_norm.rms_norm_backward)),
        (X, torch.randn(64, generator=G).bfloat16(), 1e-6),
    ),
    "qk_norm": (
        qk_norm.qk_norm,
        (rms_norm.setup, partial(rms_norm.backward, qk_norm.qk_norm_backward)),
        (HEADS, torch.randn(16, generator=G).bfloat16(), 1e-6),
    ),
    "rope": (rope.rope, (rope.setup, partial(rope.backward, rope.rope_backward)), (HEADS, torch.arange(5), TABLE)),
    "swiglu": (swiglu.swiglu, (swiglu.setup, partial(swiglu.backward, swiglu.swiglu_backward)), (X, 2)),
    "logp": (
        logp.logp,
        (logp.setup, partial(logp.backward, logp.logp_backward)),
        (LOGITS, IDS, ONES, None, None, 40, 40, 8, 1024),
    ),
}
"""Operator of torch.library, its rule of differentiation, operands."""


def _gradient(operator: Any, x: torch.Tensor, *others: Any) -> torch.Tensor:
    x = x.clone().requires_grad_()
    y = operator(x, *others)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype))
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("name", CASES)
def test_a_direct_call_has_the_gradient_of_the_library_operator(name: str) -> None:
    operator, rule, operands = CASES[name]
    direct = differentiable(operator, *rule)
    found, expected = _gradient(direct, *operands), _gradient(operator, *operands)
    assert found.count_nonzero()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


def test_a_product_of_another_device_is_called_directly_with_its_own_gradient() -> None:
    class Products:
        product, weight_grad = staticmethod(det_gemm.product), staticmethod(det_gemm.weight_grad)

        @staticmethod
        def input_grad(op: str, dy: torch.Tensor, w: torch.Tensor, splits: int, out_dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return det_gemm.input_grad(op, dy, w, splits, out_dtype) * 2

    w = torch.randn(16, 64, generator=G).bfloat16()
    direct = register_device("det_gemm", det_gemm.OPERATORS, "meta", Products).forward
    own = _gradient(det_gemm.OPERATORS.forward, X, w, 1, 2, torch.bfloat16)
    assert torch.equal(_gradient(direct, X, w, 1, 2, torch.bfloat16), own * 2)


def test_nothing_is_kept_where_no_gradient_is_wanted() -> None:
    kept = []
    direct = differentiable(lambda x: x * 2, lambda ctx, inputs, output: kept.append(output), lambda ctx, dy: dy * 2)
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert not direct(x).requires_grad
    assert not kept
    assert direct(x).requires_grad
    assert len(kept) == 1


def test_a_second_derivative_raises() -> None:
    direct = differentiable(
        lambda x: x * x, lambda ctx, inputs, output: ctx.save_for_backward(*inputs), lambda ctx, dy: 2 * dy * ctx.saved_tensors[0]
    )
    x = torch.ones(3, requires_grad=True)
    (first,) = torch.autograd.grad(direct(x), x, torch.ones(3, requires_grad=True), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
