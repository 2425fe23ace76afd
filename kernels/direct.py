"""Differentiable operators called as they are: torch.library's dispatch takes the host longer than the launch inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def differentiable(forward: Callable[..., Any], setup: Callable[..., None], backward: Callable[..., Any]) -> Callable[..., Any]:
    """``forward``, whose gradient is ``backward``: both and ``setup`` as ``CustomOpDef.register_autograd`` takes them.

    Equal to the operator of torch.library that is registered with the same functions, but for a second derivative, which raises
    RuntimeError, and tracers (torch.compile), which want that operator.
    """

    class Direct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = forward(*inputs)
            setup(ctx, inputs, output)
            return output

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return backward(ctx, *gradients)

    def run(*inputs: Any) -> Any:
        return Direct.apply(*inputs) if torch.is_grad_enabled() else forward(*inputs)

    return run
