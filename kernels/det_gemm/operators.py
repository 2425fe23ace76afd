"""det_gemm's products as ``torch.library`` operators of one name and one backend; lm_head is registered by the same functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch.library import CustomOpDef

from rlk.kernels._triton import from_triton
from rlk.kernels.direct import differentiable
from rlk.kernels.dispatch import Backends


class Products(Protocol):
    """The three contractions of a backend, a module of this folder. ``op``: the operator that asked, under whose name they are recorded."""

    def product(self, op: str, x: torch.Tensor, w: torch.Tensor, splits: int, out_dtype: torch.dtype) -> torch.Tensor: ...

    def input_grad(self, op: str, dy: torch.Tensor, w: torch.Tensor, splits: int, out_dtype: torch.dtype = ...) -> torch.Tensor: ...

    def weight_grad(self, op: str, x: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor: ...


class Operators(NamedTuple):
    """forward(x, w, splits, grad_splits, out_dtype), differentiable in x; input_part(dy, w, splits); weight_grad(x, dy, index, offsets).

    library: the torch operators of forward and of its gradient.
    """

    forward: Callable[..., torch.Tensor]
    input_part: Callable[..., torch.Tensor]
    weight_grad: Callable[..., torch.Tensor]
    library: tuple[CustomOpDef, CustomOpDef]


def register(op: str, name: str, device: str, products: Products) -> Operators:
    """The operators ``rlk::<name>`` and ``rlk::<name>_input_grad`` on tensors of ``device``, recorded as ``op``."""
    forward, input_grad = _functions(op, products)
    operator = torch.library.custom_op(f"rlk::{name}", forward, mutates_args=(), device_types=device)
    gradient = torch.library.custom_op(f"rlk::{name}_input_grad", input_grad, mutates_args=(), device_types=device)

    @operator.register_fake
    def _(x: torch.Tensor, w: torch.Tensor, splits: int, grad_splits: int, out_dtype: torch.dtype) -> torch.Tensor:
        return x.new_empty(x.shape[0], w.shape[0], dtype=out_dtype)

    @gradient.register_fake
    def _(dy: torch.Tensor, w: torch.Tensor, splits: int) -> torch.Tensor:
        return dy.new_empty(dy.shape[0], w.shape[1], dtype=torch.bfloat16)

    operator.register_autograd(partial(_backward, gradient), setup_context=_setup)
    return _operators(op, operator, (operator, gradient), products)


def register_device(op: str, operators: Operators, device: str, products: Products) -> Operators:
    """The same torch operators on tensors of another device; its forward is called as it is (``rlk.kernels.direct``)."""
    forward, input_grad = _functions(op, products)
    for operator, function in zip(operators.library, (forward, input_grad), strict=True):
        operator.register_kernel(device, function)
    return _operators(op, differentiable(forward, _setup, partial(_backward, input_grad)), operators.library, products)


def backends(op: str, cpu: Operators, vendor: Operators) -> tuple[Backends, Backends, Backends]:
    """Tables of forward, input_part and weight_grad; Triton's are ``<op>``, ``<op>_input_part`` and ``<op>_weight_grad`` of its module."""
    return (
        {"cpu": cpu.forward, "triton": from_triton(op, op), "vendor": vendor.forward},
        {"cpu": cpu.input_part, "triton": from_triton(op, f"{op}_input_part"), "vendor": vendor.input_part},
        {"cpu": cpu.weight_grad, "triton": from_triton(op, f"{op}_weight_grad"), "vendor": vendor.weight_grad},
    )


def _functions(op: str, products: Products) -> tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]:
    def forward(x: torch.Tensor, w: torch.Tensor, splits: int, grad_splits: int, out_dtype: torch.dtype) -> torch.Tensor:
        return products.product(op, x, w, splits, out_dtype)

    def input_grad(dy: torch.Tensor, w: torch.Tensor, splits: int) -> torch.Tensor:
        return products.input_grad(f"{op}.input_grad", dy, w, splits)

    return forward, input_grad


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, w, _, ctx.grad_splits, _ = inputs
    ctx.save_for_backward(w)


def _backward(gradient: Callable[..., torch.Tensor], ctx, dy):  # type: ignore[no-untyped-def]
    (w,) = ctx.saved_tensors
    return gradient(dy, w, ctx.grad_splits), None, None, None, None


def _operators(op: str, forward: Callable[..., torch.Tensor], library: tuple[CustomOpDef, CustomOpDef], products: Products) -> Operators:
    def input_part(dy: torch.Tensor, w: torch.Tensor, splits: int) -> torch.Tensor:
        return products.input_grad(f"{op}.input_grad", dy, w, splits, torch.float32)

    def weight_grad(x: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return products.weight_grad(f"{op}.weight_grad", x, dy, index, offsets)

    return Operators(forward, input_part, weight_grad, library)
