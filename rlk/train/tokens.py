"""Which tokens are being computed, and where their weight gradients go.

Weight gradients bypass autograd, which would cast them to bf16: an operator's wrapper registers the gradient's formula on its
output, and the result is folded into the parameter's fp32 ``main_grad``. A context parallel rank computes the subtree of its own token
leaves; the ranks' roots are joined before they are folded, once per micro-batch. One :class:`Tokens` belongs to one model; it is empty
outside ``use``, so a layout can be neither missing nor stale without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from rlk.contract.orders import fold_pairs
from rlk.model.trace import Trace
from rlk.parallel.state import Parallel
from rlk.train.batch import MicroBatch


class LayoutError(RuntimeError):
    """An operator ran without a token layout, with another micro-batch's, or on another number of rows."""


class GradientError(RuntimeError):
    """A parameter got no gradient, or two, or one through autograd; the message names it."""


class Tokens:
    """The micro-batch in flight, its trace, and the parameters whose gradient it has contributed to."""

    def __init__(self, parallel: Parallel) -> None:
        self._parallel = parallel
        self._batch: MicroBatch | None = None
        self._folded: set[str] = set()
        self._roots: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._shard_roots: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
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
            self._roots, self._shard_roots = {}, {}

    def batch(self, rows: int) -> MicroBatch:
        """The current micro-batch, which must have ``rows`` tokens."""
        if self._batch is None:
            raise LayoutError("no token layout: run the model inside Tokens.use(micro_batch)")
        if rows != self._batch.tokens:
            raise LayoutError(f"{rows} rows under a layout of {self._batch.tokens} tokens: the layout belongs to another micro-batch")
        return self._batch

    def on_gradient(
        self,
        y: torch.Tensor,
        parameter: torch.nn.Parameter,
        gradient: Callable[[MicroBatch, torch.Tensor], torch.Tensor],
        *,
        per_shard: bool = False,
        rows: int | None = None,
    ) -> None:
        """When the gradient of y [tokens, …] arrives, fold ``gradient(batch, dy)`` into the parameter's main gradient.

        rows: tokens of the micro-batch where y has only some of them.
        gradient: fp32, the root over this rank's leaves in the parameter's shape; per_shard: one such root for each canonical shard of
        this rank, [shards, …], of a parameter that every TP rank holds.
        """
        if not y.requires_grad:
            return
        batch = self.batch(y.shape[0] if rows is None else rows)

        def fold(dy: torch.Tensor) -> None:
            if batch is not self._batch:
                raise LayoutError("backward ran after its micro-batch was finished: call it inside Tokens.use(micro_batch)")
            name: str = parameter.rlk_name  # type: ignore[attr-defined]
            if name in self._folded:
                raise GradientError(f"{name} got two gradients from one micro-batch: run one backward per forward")
            self._folded.add(name)
            main: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
            root = gradient(batch, dy)
            if per_shard:
                self._shard_roots[name] = (main, root)
            elif self._parallel.cp.size > 1:
                self._roots[name] = (main, root)
            else:
                main.add_(root)

        y.register_hook(fold)

    def join(self) -> None:
        """After the backward: join the roots of all CP ranks by the leaf tree, then those of shards, and fold them.

        All ranks must have gradients of the same parameters (:meth:`require_gradients`).
        """
        names = sorted(self._roots)
        for name, total in zip(names, self._parallel.cp.tree_all_reduce_many([self._roots[name][1] for name in names])):
            self._roots[name][0].add_(total)
        names = sorted(self._shard_roots)
        leaves = self._parallel.cp.tree_all_reduce_many([self._shard_roots[name][1] for name in names])
        roots = [fold_pairs(list(shards), torch.add) for shards in leaves]
        for name, total in zip(names, self._parallel.tp.tree_all_reduce_many(roots)):
            self._shard_roots[name][0].add_(total)

    def require_gradients(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Raise GradientError unless every parameter got exactly one gradient from the current micro-batch, outside autograd."""
        for name, parameter in parameters.items():
            if name not in self._folded:
                raise GradientError(f"{name} got no gradient: its operator does not register one, or is not reached from the loss")
            if parameter.grad is not None:
                raise GradientError(f"{name} got a gradient through autograd, which casts it: keep its weight gradient outside")
