"""Gradient norm in an order that no topology changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import add

import torch

from rlk.contract.orders import fold_pairs
from rlk.contract.update import NORM_BLOCK
from rlk.model.shards import dimension
from rlk.parallel.collectives import Group

_AT_ONCE = 1 << 24
"""fp64 elements whose squares are held at a time, unless one shard has more."""


class GradientNormError(ArithmeticError):
    """A gradient is not finite; the message names the tensor."""


def _row_tree(rows: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, [..., n] fp64: filled with +0 to a power of two, upper half added to the lower until one is left."""
    count = rows.shape[-1]
    width = 1 << (count - 1).bit_length()
    if width != count:
        rows = torch.cat([rows, rows.new_zeros(*rows.shape[:-1], width - count)], dim=-1)
    while width > 1:
        width //= 2
        rows = rows[..., :width] + rows[..., width:]
    return rows[..., 0]


def square_sums(shards: torch.Tensor) -> torch.Tensor:
    """Σ x² of each shard, fp64 [shards], of fp32 [shards, …]: row tree per 1024 elements in row-major order, then over the block sums.

    x² of an fp32 x is exact in fp64. Several shards are added side by side; how many changes no byte.
    """
    size = shards[0].numel()
    blocks = -(-size // NORM_BLOCK)
    sums = []
    for held in shards.split(max(1, _AT_ONCE // size)):
        flat = torch.nn.functional.pad(held.reshape(len(held), -1).double(), (0, blocks * NORM_BLOCK - size))
        rows = flat.view(len(held), blocks, NORM_BLOCK)
        sums.append(_row_tree(_row_tree(rows * rows)))
    return torch.cat(sums)


def gradient_norm(gradients: Mapping[str, torch.Tensor], shards: int, tp: Group | None = None) -> float:
    """Norm over fp32 gradients by packed name, in the mapping's (model) order.

    Per (tensor, shard) :func:`square_sums`; shards joined by the tree of adjacent pairs; tensors added in order; all in fp64.
    A weight that tensor parallelism cuts has ``shards`` shards, of which each rank of ``tp`` holds its own, a replicated one has one.
    The host waits for the card once. Raises GradientNormError on NaN or Inf, on every rank.
    """
    ranks = 1 if tp is None else tp.size
    own = [square_sums(_parts(name, gradient, shards // ranks)) for name, gradient in gradients.items()]
    joined = torch.cat(own)
    every = [joined] if tp is None else list(tp.all_gather_many([joined])[0])
    by_rank = [rows.cpu().split([len(squares) for squares in own]) for rows in every]
    total = 0.0
    for at, name in enumerate(gradients):
        held = [rows[at].tolist() for rows in by_rank]
        squares = held[0][0] if dimension(name) is None else fold_pairs([square for rank in held for square in rank], add)
        if not math.isfinite(squares):
            raise GradientNormError(f"the gradient of {name} is not finite: look for the first non-finite intermediate in a trace")
        total += squares
    return math.sqrt(total)


def _parts(name: str, gradient: torch.Tensor, shards: int) -> torch.Tensor:
    """[shards, …]: the canonical shards that this rank holds of a gradient, one for a replicated tensor."""
    cut = dimension(name)
    return gradient[None] if cut is None else gradient.unflatten(cut, (shards, -1)).movedim(cut, 0)
