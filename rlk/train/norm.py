"""Gradient norm in an order that no topology changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import add

import torch

from rlk.contract.orders import fold_pairs
from rlk.contract.update import NORM_BLOCK
from rlk.kernels.update import square_sums
from rlk.model.shards import dimension
from rlk.parallel.collectives import Group


class GradientNormError(ArithmeticError):
    """A gradient is not finite; the message names the tensor."""


Squares = Callable[[Sequence[torch.Tensor], int], Callable[[], torch.Tensor]]
"""``rlk.kernels.update.square_sums``, or its composition."""


class GradientNorm:
    """Norm over fp32 gradients by packed name, in the mapping's (model) order, as often as wanted while they keep their memory.

    Per (tensor, shard) ``rlk.kernels.update.square_sums`` of blocks of 1024 elements; shards joined by the tree of adjacent pairs; tensors
    added in order; all in fp64. A weight that tensor parallelism cuts has ``shards`` shards, of which each rank of ``tp`` holds its own, a
    replicated one has one. squares: starts the sums of this rank's shards, fp64 [shards of all gradients].
    """

    def __init__(self, gradients: Mapping[str, torch.Tensor], shards: int, tp: Group | None = None, squares: Squares = square_sums) -> None:
        self._tp, own = tp, shards // (1 if tp is None else tp.size)
        self._shards = {name: 1 if dimension(name) is None else own for name in gradients}
        self.squares = squares([_parts(name, gradient, own) for name, gradient in gradients.items()], NORM_BLOCK)

    def value(self, squares: torch.Tensor) -> float:
        """The norm from every rank's squares; the host waits for the card once. Raises GradientNormError on NaN or Inf, on every rank."""
        every = squares[None] if self._tp is None else self._tp.all_gather_many([squares])[0]
        by_rank, total, at = every.tolist(), 0.0, 0
        for name, count in self._shards.items():
            held = [shard for rank in by_rank for shard in rank[at : at + count]]
            square = held[0] if dimension(name) is None else fold_pairs(held, add)
            if not math.isfinite(square):
                raise GradientNormError(f"the gradient of {name} is not finite: look for the first non-finite intermediate in a trace")
            total += square
            at += count
        return math.sqrt(total)


def _parts(name: str, gradient: torch.Tensor, shards: int) -> torch.Tensor:
    """[shards, …]: the canonical shards that this rank holds of a gradient, one for a replicated tensor."""
    cut = dimension(name)
    if cut is None:
        return gradient[None]
    shape = gradient.shape
    return gradient.view(*shape[:cut], shards, -1, *shape[cut + 1 :]).transpose(0, cut)
