"""The strict sampler on the host: one row at a time, by the rule of ``rlk.kernels.sampling``; on a card see ``sampling_device``.

Greedy rows are scored at T = 1. The logprob is the logp operator's over the retained ids in place.

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
from rlk.kernels.sampling import cpu as rule
from rlk.model.linear import joined
from rlk.parallel.collectives import ALONE, Group
from rlk.parallel.errors import MismatchError


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
    return _retained(t, rule.weights(t), params).tolist() if params.truncates else None


def draw(row: torch.Tensor, params: SamplingParams, retained: Sequence[int] | None, position: int) -> int:
    """The token of ``row`` ([V] fp32), a function of the arguments alone; never one of probability zero.

    retained: what :func:`retained_ids` gave. position: index of the token in the response; each (seed, position) has its own random number.
    Raises FloatingPointError as :func:`retained_ids` does.
    """
    t = _scaled(row, params)
    if params.greedy:
        return int(t.argmax())
    return rule.pick(rule.weights(t), None if retained is None else np.asarray(retained), params.seed, position)


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
    """Draw one token per row on the host, and score it on the device of the logits.

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
    temperature = torch.tensor([p.scoring_temperature for p in params], dtype=torch.float32, device=logits.device)
    drawn_ids, supports = _draw_rows((whole[:, :vocab_size] / temperature[:, None]).cpu().numpy(), params, positions)
    tokens = drawn_ids.to(logits.device)
    truncated = any(kept is not None for kept in supports)
    mask = support_mask(supports, vocab_size, width=whole.shape[1]).to(logits.device) if truncated else None
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
        weights = rule.weights(t)
        retained = _retained(t, weights, param) if param.truncates else None
        ids.append(rule.pick(weights, retained, param.seed, position))
        supports.append(None if retained is None else tuple(retained.tolist()))
    return torch.tensor(ids, dtype=torch.int64), supports


def _scaled(row: torch.Tensor, params: SamplingParams) -> rule.Row:
    t: rule.Row = np.divide(row.numpy(), np.float32(params.scoring_temperature), dtype=np.float32)
    if not np.isfinite(t).all():
        raise FloatingPointError(f"logits divided by temperature {params.scoring_temperature} are not finite")
    return t


def _retained(t: rule.Row, weights: rule.Weights, params: SamplingParams) -> rule.Ids:
    return rule.retained(t, weights, rule.fixed_point(params.top_p), params.top_k)
