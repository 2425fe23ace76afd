"""Gradient norm in an order that no topology changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import add

import torch

from rlk.contract.orders import fold_pairs
from rlk.contract.update import NORM_BLOCK
from rlk.kernels.update import block_squares
from rlk.kernels.update.cpu import row_tree
from rlk.model.shards import dimension
from rlk.parallel.collectives import Group


class GradientNormError(ArithmeticError):
    """A gradient is not finite; the message names the tensor."""


Squares = Callable[[torch.Tensor, int], torch.Tensor]
"""``rlk.kernels.update.block_squares``, or its composition."""


def square_sums(tensors: Sequence[torch.Tensor], squares: Squares = block_squares) -> list[torch.Tensor]:
    """Σ x² of each shard of each tensor, fp64 [shards], of fp32 [shards, …]: row tree per 1024 elements in row-major order, then over the
    block sums. Shards of as many blocks are added side by side, which changes no byte."""
    sums = [squares(shards, NORM_BLOCK) for shards in tensors]
    by_blocks: dict[int, list[int]] = {}
    for at, rows in enumerate(sums):
        by_blocks.setdefault(rows.shape[1], []).append(at)
    for alike in by_blocks.values():
        totals = row_tree(torch.cat([sums[at] for at in alike])).split([len(sums[at]) for at in alike])
        for at, total in zip(alike, totals):
            sums[at] = total
    return sums


def gradient_norm(gradients: Mapping[str, torch.Tensor], shards: int, tp: Group | None = None, squares: Squares = block_squares) -> float:
    """Norm over fp32 gradients by packed name, in the mapping's (model) order.

    Per (tensor, shard) :func:`square_sums`; shards joined by the tree of adjacent pairs; tensors added in order; all in fp64.
    A weight that tensor parallelism cuts has ``shards`` shards, of which each rank of ``tp`` holds its own, a replicated one has one.
    The host waits for the card once. Raises GradientNormError on NaN or Inf, on every rank.
    """
    ranks = 1 if tp is None else tp.size
    own = square_sums([_parts(name, gradient, shards // ranks) for name, gradient in gradients.items()], squares)
    joined = torch.cat(own)
    every = [joined] if tp is None else list(tp.all_gather_many([joined])[0])
    by_rank = [rows.cpu().split([len(sums) for sums in own]) for rows in every]
    total = 0.0
    for at, name in enumerate(gradients):
        held = [rows[at].tolist() for rows in by_rank]
        square = held[0][0] if dimension(name) is None else fold_pairs([shard for rank in held for shard in rank], add)
        if not math.isfinite(square):
            raise GradientNormError(f"the gradient of {name} is not finite: look for the first non-finite intermediate in a trace")
        total += square
    return math.sqrt(total)


def _parts(name: str, gradient: torch.Tensor, shards: int) -> torch.Tensor:
    """[shards, …]: the canonical shards that this rank holds of a gradient, one for a replicated tensor."""
    cut = dimension(name)
    return gradient[None] if cut is None else gradient.unflatten(cut, (shards, -1)).movedim(cut, 0)
