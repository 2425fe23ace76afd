"""Which tokens are being computed, and where their weight gradients go.

Weight gradients bypass autograd, which would cast them to bf16: an operator's wrapper registers the gradient's formula on its
output, and the result is folded into the parameter's fp32 ``main_grad``. One :class:`Tokens` belongs to one model; it is empty
outside ``use``, so a layout can be neither missing nor stale without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from rlk.model.trace import Trace
from rlk.train.batch import MicroBatch


class LayoutError(RuntimeError):
    """An operator ran without a token layout, with another micro-batch's, or on another number of rows."""


class GradientError(RuntimeError):
    """A parameter got no gradient, or two, or one through autograd; the message names it."""


class Tokens:
    """The micro-batch in flight, its trace, and the parameters whose gradient it has contributed to."""

    def __init__(self) -> None:
        self._batch: MicroBatch | None = None
        self._folded: set[str] = set()
        self.trace: Trace | None = None

    @contextmanager
    def use(self, batch: MicroBatch, trace: Trace | None = None) -> Iterator[None]:
        """Make ``batch`` current for a forward and its backward; nesting raises LayoutError."""
        if self._batch is not None:
            raise LayoutError("a micro-batch is already in flight in this model: finish its backward first")
        self._batch, self.trace, self._folded = batch, trace, set()
        try:
            yield
        finally:
            self._batch = self.trace = None

    def batch(self, rows: int) -> MicroBatch:
        """The current micro-batch, which must have ``rows`` tokens."""
        if self._batch is None:
            raise LayoutError("no token layout: run the model inside Tokens.use(micro_batch)")
        if rows != self._batch.tokens:
            raise LayoutError(f"{rows} rows under a layout of {self._batch.tokens} tokens: the layout belongs to another micro-batch")
        return self._batch

    def on_gradient(
        self, y: torch.Tensor, parameter: torch.nn.Parameter, gradient: Callable[[MicroBatch, torch.Tensor], torch.Tensor]
    ) -> None:
        """When the gradient of y [tokens, …] arrives, add ``gradient(batch, dy)`` (fp32, the parameter's shape) to its main gradient."""
        if not y.requires_grad:
            return
        batch = self.batch(y.shape[0])

        def fold(dy: torch.Tensor) -> None:
            if batch is not self._batch:
                raise LayoutError("backward ran after its micro-batch was finished: call it inside Tokens.use(micro_batch)")
            name: str = parameter.rlk_name  # type: ignore[attr-defined]
            if name in self._folded:
                raise GradientError(f"{name} got two gradients from one micro-batch: run one backward per forward")
            self._folded.add(name)
            main: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
            main.add_(gradient(batch, dy))

        y.register_hook(fold)

    def require_gradients(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Raise GradientError unless every parameter got exactly one gradient from the current micro-batch, outside autograd."""
        for name, parameter in parameters.items():
            if name not in self._folded:
                raise GradientError(f"{name} got no gradient: its operator does not register one, or is not reached from the loss")
            if parameter.grad is not None:
                raise GradientError(f"{name} got a gradient through autograd, which casts it: keep its weight gradient outside")
