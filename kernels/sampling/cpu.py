"""CPU backend of sampling: the rule in numpy, one row at a time."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

Row = NDArray[np.float32]
Weights = NDArray[np.int64]
Ids = NDArray[np.int64]

POWER = (
    1.0, 0.6931470632553101, 0.2402293086051941, 0.055485282093286514, 0.009675451554358006, 0.0012467846972867846, 0.00021612914861179888,
)  # fmt: skip
"""2^f on [0, 1] by ascending powers of f; relative error 2e-9 exactly and 9e-8 in fp32, rising everywhere, 1 at 0 and 2 at 1."""

WHOLE = -1
"""Fixed-point top_p of a row that keeps all: every bit set."""

FIRST_CANDIDATES = 1024
"""Ids that top_p sorts at first; it takes eight times as many until they hold the mass. The result does not depend on it."""


def fixed_point(top_p: float) -> int:
    """⌊2^64·top_p⌋ as the int64 of the same bits; WHOLE for 1."""
    if top_p >= 1:
        return WHOLE
    bits = int(top_p * 2.0**64)
    return bits - (1 << 64) if bits >> 63 else bits


def weights(t: Row) -> Weights:
    """w of every id, [V] int64."""
    with np.errstate(over="ignore"):
        y = np.maximum((t - t.max()) * np.float32(1.4426950408889634), np.float32(-64.0))
    n = np.floor(y)
    f = y - n
    p = np.full_like(f, POWER[-1])
    for coefficient in reversed(POWER[:-1]):
        p = p * f + np.float32(coefficient)
    mantissa = (p * np.float32(1 << 23)).astype(np.int64)
    return (mantissa << 21) >> (-n).astype(np.int64)


def retained(t: Row, w: Weights, top_p: int, top_k: int) -> Ids:
    """Ids that top_k (-1: all), then top_p (fixed point) leave, ascending."""
    whole = top_k == -1 or top_k >= t.size
    if whole and top_p == WHOLE:
        return np.arange(t.size)
    ordered = _largest(t, min(FIRST_CANDIDATES, t.size) if whole else top_k)
    if top_p != WHOLE:
        running = w[ordered].cumsum()
        mass = max(1, -(-(top_p % (1 << 64)) * int(w.sum() if whole else running[-1]) >> 64))
        while running[-1] < mass:
            ordered = _largest(t, min(8 * ordered.size, t.size))
            running = w[ordered].cumsum()
        ordered = ordered[: int(running.searchsorted(mass)) + 1]
    ordered.sort()
    return ordered


def pick(w: Weights, kept: Ids | None, seed: int, position: int) -> int:
    """The id drawn from ``kept`` (None: all) for (seed, position)."""
    running = (w if kept is None else w[kept]).cumsum()
    uniform = int(np.random.Philox(key=seed, counter=position).random_raw())
    chosen = int(running.searchsorted(uniform * int(running[-1]) >> 64, side="right"))
    return chosen if kept is None else int(kept[chosen])


def _largest(t: Row, count: int) -> Ids:
    """The ``count`` largest entries' ids in (t descending, id ascending) order."""
    if count == t.size:
        return (-t).argsort(kind="stable")
    candidates = np.flatnonzero(t >= np.partition(t, t.size - count)[t.size - count])
    return candidates[(-t[candidates]).argsort(kind="stable")[:count]]


def sample(
    logits: torch.Tensor, temperature: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor, seed: torch.Tensor, position: torch.Tensor,
    failed: torch.Tensor, vocab_size: int, padded_vocab: int, by_count: bool, by_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    ids = torch.zeros(len(logits), dtype=torch.int64)
    mask = np.zeros((len(logits), padded_vocab), dtype=np.bool_)
    for i, z in enumerate(logits[:, :vocab_size].numpy()):
        with np.errstate(over="ignore"):
            t = z / temperature[i].numpy()
        k, s, at = int(top_k[i]), int(seed[i]), int(position[i])
        overlooked = (not by_count and 0 < k < vocab_size) or (not by_weight and k != 0 and int(top_p[i]) != WHOLE)
        if overlooked or not np.isfinite(t).all():
            mask[i, :vocab_size] = True
            if failed[0] == 0:
                failed.copy_(torch.tensor([2 if overlooked else 1, s, at]))
        elif k == 0:
            ids[i] = int(t.argmax())
            mask[i, :vocab_size] = True
        else:
            w = weights(t)
            kept = retained(t, w, int(top_p[i]), k)
            ids[i] = pick(w, kept, s, at)
            mask[i, kept] = True
    return ids, torch.from_numpy(np.packbits(mask, axis=1, bitorder="little")) if by_count or by_weight else None
