"""Logprobs of a rank's rows from its vocabulary shards, and every rank's logprobs joined."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk.contract.numerics import Numerics
from rlk.kernels.logp import logp, shards, support_mask
from rlk.kernels.logp.shards import Columns
from rlk.parallel.collectives import Group
from rlk.parallel.state import Parallel
from rlk.train.batch import MicroBatch, Sample


class NonFiniteError(ArithmeticError):
    """The model produced NaN or Inf; the message names the first row."""


def require_ids(samples: Sequence[Sample], vocab_size: int) -> None:
    """Raise IndexError for an id outside the vocabulary, on every rank, which holds all samples, and before a card sees it."""
    for sample in samples:
        if min(sample.ids) < 0 or max(sample.ids) >= vocab_size:
            token = next(token for token in sample.ids if not 0 <= token < vocab_size)
            raise IndexError(f"sample {sample.sample_id}: id {token} is outside 0…{vocab_size - 1}: drop masked tokens")


class Scoring:
    """From the logits of one rank to the logprob of each of its rows."""

    def __init__(self, vocab_size: int, padded_vocab: int, numerics: Numerics, parallel: Parallel) -> None:
        self.vocab_size, self.padded_vocab, self.numerics, self.parallel = vocab_size, padded_vocab, numerics, parallel
        width = padded_vocab // numerics.canonical_tp
        self.columns = Columns(parallel.shards.start * width, len(parallel.shards), width, vocab_size)

    def rows(self, batch: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(fp32, one for each row of ``logits``: logprob of the next token in the rows that predict a response token, +0 in the others;
        int64 [1]: first row of the TP group with a logit that is not finite, or -1).

        logits: fp32 [rows, columns of this rank], of ``batch.scored`` or of all T tokens.
        """
        count, at = len(logits), self._at(batch, len(logits))
        if count == batch.tokens:
            bad = first_bad_row(logits.detach())
        else:
            bad = first_bad_row(logits.detach()[: len(batch.rows)])  # a rank that scores none has a row of no meaning
            bad = torch.where(bad < 0, bad, batch.scored[bad])
        active = batch.ids.new_zeros(count, dtype=torch.bool)
        active.index_fill_(0, at, True)  # an item assignment waits for the card
        targets = batch.targets.new_zeros(count)
        targets[at] = batch.targets
        temperature = batch.temperature.new_ones(count)
        temperature[at] = batch.temperature
        support = self._support(batch, count)
        if self.parallel.tp.size > 1:
            args = (targets, temperature, support, active, bad, self.columns, self.numerics.vocab_tile, self.parallel.tp)
            result: tuple[torch.Tensor, torch.Tensor] = _ShardedLogp.apply(logits, *args)
            return result
        scores = logp(
            logits, targets, temperature, vocab_size=self.vocab_size, padded_vocab=self.padded_vocab, shards=self.numerics.canonical_tp,
            vocab_tile=self.numerics.vocab_tile, support=support, active=active,
        )  # fmt: skip
        return scores, bad

    def of_targets(self, batch: MicroBatch, scores: torch.Tensor) -> torch.Tensor:
        """fp32, one for each of ``batch.targets``, of the scores that :meth:`rows` gave."""
        return scores[self._at(batch, len(scores))]

    def seeded(self, batch: MicroBatch, scores: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        """The gradient of the scores that :meth:`rows` gave: ``slopes`` of every response token of all samples, fp32, +0 elsewhere."""
        seed = torch.zeros_like(scores)
        seed[self._at(batch, len(scores))] = slopes[batch.own]
        return seed

    def joined(self, batch: MicroBatch, scores: torch.Tensor, bad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """On every rank, from the scores and bad rows that :meth:`rows` gave to each: logprob of every response token of all samples, fp32
        [tokens], and what :func:`require_finite` wants to know of them, int64 []; the host does not wait for a card."""
        own = scores.new_zeros(batch.tokens)
        own[batch.rows] = self.of_targets(batch, scores.detach())
        every, worst = self.parallel.cp.all_gather_many([own, bad])
        return every.flatten()[batch.joined], worst.max()

    @staticmethod
    def _at(batch: MicroBatch, count: int) -> torch.Tensor:
        """Which of ``count`` rows of logits predict the targets: ``batch.rows`` of all tokens, the first ones of ``batch.scored``."""
        return batch.rows if count == batch.tokens else torch.arange(len(batch.rows), device=batch.rows.device)

    def _support(self, batch: MicroBatch, count: int) -> torch.Tensor | None:
        """bool [count, columns of this rank] if any target's support is truncated, else None."""
        if all(kept is None for kept in batch.supports):
            return None
        first, last = self.columns.first, self.columns.first + self.columns.width
        rows: list[tuple[int, ...] | None] = [None] * count
        for row, kept in zip(self._at(batch, count).tolist(), batch.supports):
            rows[row] = kept if kept is None or self.parallel.tp.size == 1 else tuple(i - first for i in kept if first <= i < last)
        return support_mask(rows, self.columns.real, width=self.columns.width).to(batch.ids.device)


def first_bad_row(logits: torch.Tensor) -> torch.Tensor:
    """int64 [1]: the first row of logits [T, V] with a value that is not finite, or -1; the host does not wait for it."""
    rows = torch.arange(len(logits), device=logits.device)
    least, most = torch.aminmax(logits, dim=-1)  # NaN if any is
    wrong = ~(least.isfinite() & most.isfinite())
    first = torch.where(wrong, rows, len(logits)).min().reshape(1) if len(logits) else rows.new_zeros(1)
    return torch.where(first == len(logits), -1, first)


def require_finite(bad: torch.Tensor) -> None:
    """Raise NonFiniteError for the first bad row, one int64, unless it is -1; the host waits for the card."""
    row = int(bad)
    if row >= 0:
        raise NonFiniteError(f"logits of packed row {row} are not finite: trace the samples to find where it begins")


class _ShardedLogp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, ids, temperature, support, active, bad, columns: Columns, vocab_tile: int, tp: Group):  # type: ignore[no-untyped-def]
        part = shards.part(logits, ids, temperature, columns, vocab_tile=vocab_tile, support=support, active=active)
        parts, worst = tp.all_gather_many([part, bad])
        scores, lse = shards.join(parts, ids, columns, active=active)
        ctx.save_for_backward(logits, ids, temperature, support, active, lse)
        ctx.columns = columns
        worst = worst.max().reshape(1)
        ctx.mark_non_differentiable(worst)
        return scores, worst

    @staticmethod
    def backward(ctx, seed, _):  # type: ignore[no-untyped-def]
        logits, ids, temperature, support, active, lse = ctx.saved_tensors
        slope = shards.gradient(logits, ids, temperature, lse, seed, ctx.columns, support=support, active=active)
        return slope, *(None,) * 8
