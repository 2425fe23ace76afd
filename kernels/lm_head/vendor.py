"""Vendor backend of lm_head: det_gemm's certified library under lm_head's name."""

from __future__ import annotations

import torch

from rlk.kernels.det_gemm.vendor import input_grad, product, weight_grad


@torch.library.custom_op("rlk::lm_head_vendor", mutates_args=(), device_types="cuda")
def lm_head(h: torch.Tensor, w: torch.Tensor, grad_splits: int) -> torch.Tensor:
    return product("lm_head", h, w, 1, torch.float32)


@lm_head.register_fake
def _(h: torch.Tensor, w: torch.Tensor, grad_splits: int) -> torch.Tensor:
    return h.new_empty(h.shape[0], w.shape[0], dtype=torch.float32)


@torch.library.custom_op("rlk::lm_head_vendor_input_grad", mutates_args=(), device_types="cuda")
def lm_head_input_grad(dy: torch.Tensor, w: torch.Tensor, splits: int) -> torch.Tensor:
    return input_grad("lm_head.input_grad", dy, w, splits)


@lm_head_input_grad.register_fake
def _(dy: torch.Tensor, w: torch.Tensor, splits: int) -> torch.Tensor:
    return dy.new_empty(dy.shape[0], w.shape[1], dtype=torch.bfloat16)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, w, ctx.grad_splits = inputs
    ctx.save_for_backward(w)


def _backward(ctx, dy):  # type: ignore[no-untyped-def]
    (w,) = ctx.saved_tensors
    return torch.ops.rlk.lm_head_vendor_input_grad(dy, w, ctx.grad_splits), None, None


lm_head.register_autograd(_backward, setup_context=_setup)


def lm_head_input_part(dy: torch.Tensor, w: torch.Tensor, splits: int) -> torch.Tensor:
    return input_grad("lm_head.input_grad", dy, w, splits, torch.float32)


def lm_head_weight_grad(h: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return weight_grad("lm_head.weight_grad", h, dy, index, offsets)
