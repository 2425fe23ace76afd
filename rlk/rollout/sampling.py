"""The strict sampler: one row at a time, so that no neighbour in the batch can change a token, a support or a logprob.

Order, for a row z of fp32 logits over the vocabulary:

1. t = z/T, IEEE fp32; T = 1 when greedy.
2. top_k keeps the k largest t, ties by lower id.
3. top_p keeps the shortest prefix of the kept ids in (t descending, id ascending) order whose probability reaches top_p, at least one.
   w = exp(t − max t) in float64; running mass and total are left-to-right float64 sums in that order, but a total over the whole
   vocabulary runs over ascending ids.
4. The token: greedy takes the largest t, ties by lower id. Otherwise the inverse of the cumulative weight over the retained ids
   ascending, at u·total, where u is the first draw of Philox4x64 with key = seed and counter = position.
5. The logprob: the logp operator over the retained ids in place.

Tensor parallel ranks hold the logits of their own vocabulary shards: they gather all of them to draw, each for itself, and score by the
tree over shards, each its own. That all drew the same ids is checked in every step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rlk.contract.numerics import Numerics
from rlk.contract.sampling import SamplingParams
from rlk.contract.topology import owned
from rlk.kernels.logp import logp, shards, support_mask
from rlk.model.linear import joined
from rlk.parallel.collectives import ALONE, Group
from rlk.parallel.errors import MismatchError

Row = NDArray[np.float32]
Weights = NDArray[np.float64]
Ids = NDArray[np.int64]

FIRST_CANDIDATES = 1024
"""Ids that top_p sorts at first; it takes eight times as many until they hold the mass. The result does not depend on it."""


@dataclass(frozen=True)
class Sampled:
    """Tokens of one decode step: ids [T] int64, logprobs [T] fp32, and per row the retained ids ascending (None: not truncated)."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    supports: list[tuple[int, ...] | None]


def retained_ids(row: torch.Tensor, params: SamplingParams) -> list[int] | None:
    """Ids that top_k, then top_p leave, ascending; None when ``params`` do not truncate.

    row: [V] fp32 logits of the real vocabulary. Raises FloatingPointError when a logit, or a logit divided by T, is not finite.
    """
    t = _scaled(row, params)
    return _retained(t, _weights(t), params).tolist() if params.truncates else None


def draw(row: torch.Tensor, params: SamplingParams, retained: Sequence[int] | None, position: int) -> int:
    """The token of ``row`` ([V] fp32), a function of the arguments alone; never one of probability zero.

    retained: what :func:`retained_ids` gave. position: index of the token in the response; each (seed, position) has its own random number.
    Raises FloatingPointError as :func:`retained_ids` does.
    """
    t = _scaled(row, params)
    if params.greedy:
        return int(t.argmax())
    return _draw(_weights(t), None if retained is None else np.asarray(retained), params.seed, position)


def sample_rows(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    *,
    vocab_size: int,
    padded_vocab: int,
    numerics: Numerics,
    tp: Group = ALONE,
) -> Sampled:
    """Draw and score one token per row.

    logits: [T, width] fp32, vocab_size <= width <= padded_vocab; columns from vocab_size on are ignored. Of several ranks in ``tp`` each
    passes its own padded_vocab/ranks columns, and all get the same result. Greedy rows are scored at T = 1, rows that are not truncated
    over the whole vocabulary; the logprobs of all rows come from one call of the logp operator.
    Raises ValueError when rows, params and positions do not match, FloatingPointError naming the row whose logits are not finite,
    MismatchError on every rank when ranks draw different ids.
    """
    whole = joined(logits, tp)
    if logits.ndim != 2 or not len(params) == len(positions) == logits.shape[0] or whole.shape[1] < vocab_size:
        raise ValueError(
            f"sample_rows: logits {tuple(logits.shape)}, {len(params)} params, {len(positions)} positions, vocabulary {vocab_size}"
        )
    temperature = torch.tensor([p.scoring_temperature for p in params], dtype=torch.float32)
    tokens, supports = _draw_rows((whole[:, :vocab_size] / temperature[:, None]).numpy(), params, positions)
    truncated = any(kept is not None for kept in supports)
    mask = support_mask(supports, vocab_size, width=whole.shape[1]) if truncated else None
    if tp.size == 1:
        logprobs = logp(
            logits, tokens, temperature, vocab_size=vocab_size, padded_vocab=padded_vocab, shards=numerics.canonical_tp,
            vocab_tile=numerics.vocab_tile, support=mask,
        )  # fmt: skip
        return Sampled(tokens, logprobs, supports)
    held, width = owned(tp.size, tp.rank, numerics.canonical_tp), padded_vocab // numerics.canonical_tp
    columns = shards.Columns(held.start * width, len(held), width, vocab_size)
    own = None if mask is None else mask[:, columns.first : columns.first + columns.width]
    part = shards.part(logits, tokens, temperature, columns, vocab_tile=numerics.vocab_tile, support=own)
    parts, drawn = tp.all_gather_many([part, tokens])
    if bool((drawn != tokens).any()):
        raise MismatchError(f"ranks drew different tokens from the same logits, {drawn.tolist()}: give every rank the same requests")
    return Sampled(tokens, shards.join(parts, tokens, columns)[0], supports)


def _draw_rows(
    scaled: NDArray[np.float32], params: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[torch.Tensor, list[tuple[int, ...] | None]]:
    """Ids [T] int64 and retained ids of logits that are already divided by their temperature."""
    for bad in np.flatnonzero(~np.isfinite(scaled).all(axis=1))[:1]:
        raise FloatingPointError(f"row {bad}: logits divided by temperature {params[bad].scoring_temperature} are not finite")
    ids: list[int] = []
    supports: list[tuple[int, ...] | None] = []
    for t, param, position in zip(scaled, params, positions, strict=True):
        if param.greedy:
            ids.append(int(t.argmax()))
            supports.append(None)
            continue
        weights = _weights(t)
        retained = _retained(t, weights, param) if param.truncates else None
        ids.append(_draw(weights, retained, param.seed, position))
        supports.append(None if retained is None else tuple(retained.tolist()))
    return torch.tensor(ids, dtype=torch.int64), supports


def _scaled(row: torch.Tensor, params: SamplingParams) -> Row:
    t: Row = np.divide(row.numpy(), np.float32(params.scoring_temperature), dtype=np.float32)
    if not np.isfinite(t).all():
        raise FloatingPointError(f"logits divided by temperature {params.scoring_temperature} are not finite")
    return t


def _weights(t: Row) -> Weights:
    return np.exp(t.astype(np.float64) - float(t.max()))


def _largest(t: Row, count: int) -> Ids:
    """The ``count`` largest entries' ids in (t descending, id ascending) order."""
    if count == t.size:
        return (-t).argsort(kind="stable")
    candidates = np.flatnonzero(t >= np.partition(t, t.size - count)[t.size - count])
    return candidates[(-t[candidates]).argsort(kind="stable")[:count]]


def _retained(t: Row, weights: Weights, params: SamplingParams) -> Ids:
    whole = params.top_k == -1 or params.top_k >= t.size
    if whole and params.top_p == 1:
        return np.arange(t.size)
    ordered = _largest(t, min(FIRST_CANDIDATES, t.size) if whole else params.top_k)
    if params.top_p < 1:
        running = weights[ordered].cumsum()
        mass = params.top_p * (weights.cumsum() if whole else running)[-1]
        while running[-1] < mass and ordered.size < t.size:
            ordered = _largest(t, min(8 * ordered.size, t.size))
            running = weights[ordered].cumsum()
        ordered = ordered[: int(running.searchsorted(mass)) + 1]
    ordered.sort()
    return ordered


def _draw(weights: Weights, retained: Ids | None, seed: int, position: int) -> int:
    running = (weights if retained is None else weights[retained]).cumsum()
    uniform = (np.random.Philox(key=seed, counter=position).random_raw() >> 11) * 2.0**-53
    # uniform < 1, so the product rounds below the total, and the first sum above it belongs to an id with weight.
    chosen = int(running.searchsorted(uniform * running[-1], side="right"))
    return chosen if retained is None else int(retained[chosen])
