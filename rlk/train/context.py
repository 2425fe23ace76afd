"""Core attention of a context parallel rank: it owns the queries and keys of its zigzag chunks and gathers the others'.

Nothing is added across ranks: for the output and dQ a rank gathers K and V, for dK and dV it gathers Q, dO, LSE₂ and Σ dO·O.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlk.contract.numerics import Numerics
from rlk.kernels.attention.context import Segment, attend, delta, key_gradient, query_gradient
from rlk.parallel.collectives import Group

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Context:
    """real: int64, the rank's rows that are no padding. segments: runs of consecutive positions among them, in order.

    order: int64, for every token of the whole sequences, packed one after another, its row when the ranks' rows are joined in rank order.
    """

    real: torch.Tensor
    segments: tuple[Segment, ...]
    order: torch.Tensor

    def whole(self, gathered: torch.Tensor) -> torch.Tensor:
        """[ranks, T, …] of all ranks -> the whole sequences without padding, packed."""
        return gathered.flatten(0, 1)[self.order]

    def scatter(self, values: torch.Tensor, rows: int) -> torch.Tensor:
        """Values of the real rows among ``rows`` rows; padding rows are +0."""
        result = values.new_zeros(rows, *values.shape[1:])
        result[self.real] = values
        return result


def context_of(lengths: Sequence[int], mine: Sequence[Sequence[int]], place: Sequence[Integers], starts: Sequence[int]) -> Context:
    """lengths: real tokens of each sample; mine: the positions this rank holds of each; place: of each sample, joined rows by position."""
    real: list[int] = []
    segments: list[Segment] = []
    whole = [0, *accumulate(lengths)]
    for sample, (length, positions) in enumerate(zip(lengths, mine)):
        for row, position in enumerate(positions, starts[sample]):
            if position >= length:
                continue
            last = segments[-1] if segments else None
            if last and last.gathered == whole[sample] and last.position + last.rows == position:
                segments[-1] = last._replace(rows=last.rows + 1)
            else:
                segments.append(Segment(len(real), 1, position, whole[sample], length))
            real.append(row)
    order = np.concatenate([rows[:length] for rows, length in zip(place, lengths)])
    return Context(torch.tensor(real, dtype=torch.int64), tuple(segments), torch.from_numpy(order))


class ContextAttention(torch.autograd.Function):
    """q [T, Hq, D], k and v [T, Hk, D] of the rank's rows -> [T, Hq, D]; padding rows give +0 both ways."""

    @staticmethod
    def forward(ctx, q, k, v, context: Context, cp: Group, scale: float, numerics: Numerics):  # type: ignore[no-untyped-def]
        k_whole, v_whole = (context.whole(t) for t in cp.all_gather_many([k, v]))
        q_real = q[context.real]
        sizes: dict[str, Any] = {"scale": scale, "kv_tile": numerics.kv_tile, "kv_split": numerics.kv_split}
        backend = numerics.attention_backend(q.device.type)
        out, lse2 = attend(q_real, k_whole, v_whole, context.segments, **sizes, backend=backend)
        ctx.save_for_backward(q, k, v, k_whole, v_whole, out, lse2)
        ctx.context, ctx.cp, ctx.scale = context, cp, scale
        return context.scatter(out, len(q))

    @staticmethod
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        q, k, v, k_whole, v_whole, out, lse2 = ctx.saved_tensors
        context, rows, segments, scale = ctx.context, len(q), ctx.context.segments, ctx.scale
        d_real = d_out[context.real]
        sums = delta(out, d_real)
        dq = query_gradient(q[context.real], k_whole, v_whole, d_real, lse2, sums, segments, scale=scale)
        rows_of = [q, d_out, context.scatter(lse2, rows), context.scatter(sums, rows)]
        q_whole, d_whole, lse_whole, sums_whole = (context.whole(t) for t in ctx.cp.all_gather_many(rows_of))
        keys, values = k[context.real], v[context.real]
        dk, dv = key_gradient(q_whole, keys, values, d_whole, lse_whole, sums_whole, segments, scale=scale)
        return *(context.scatter(t, rows) for t in (dq, dk, dv)), None, None, None, None
