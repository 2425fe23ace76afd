"""logp: log-probability of one selected token per row of fp32 logits.

Reduction order (contract, "Logprob"), t = z/T by IEEE division:

1. The vocabulary is ``shards`` shards of padded_vocab/shards columns; a shard is cut in tiles of ``vocab_tile``, the last one short.
2. A tile gives (m, s): m = max t, s = Σ exp(t − m) by row tree. Columns off the support count +0 in place; they are never compacted away.
3. Tiles merge ascending inside a shard, shards by the tree of adjacent pairs, without FMA:
   m = max(m₁, m₂), s = s₁·exp(m₁ − m) + s₂·exp(m₂ − m). A state without mass leaves the other's bytes alone.
4. LSE = m + log s; logp = t[id] − LSE.

Backward, each step rounded to fp32: p = exp(t − LSE); a = [j = id] − p; b = seed·a; c = b/T; dlogits = bf16(c) widened to fp32.
Off the support dlogits is +0.

A NaN or +inf in a supported logit makes the row's results NaN, never hides; −inf is a column of probability zero. The callers of a
strict path refuse all three before they get here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from rlk.kernels._triton import from_triton
from rlk.kernels.checked import unread
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.logp import cpu

_FORWARD: Backends = {"cpu": cpu.logp, "triton": from_triton("logp", "logp")}


def logp(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    *,
    vocab_size: int,
    padded_vocab: int,
    shards: int = 8,
    vocab_tile: int = 1024,
    support: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Log-probability [T] fp32 of ``ids`` under softmax(logits/temperature) over the support.

    logits: [T, width] fp32, width <= padded_vocab; columns >= vocab_size and missing ones are off the support, and any width that
    holds the supported columns gives the same bytes. ids: [T] int64. temperature: [T] fp32, positive and finite.
    support: [T, width] bool, or [T, width/8 or more] uint8 with column 8i + j in bit j of byte i; None for every real column.
    active: [T] bool, None for all; an inactive row is not read, its id may be anything, and its logp and gradient are +0.
    Differentiable in logits: the gradient is fp32 and holds bf16 values. Order of reduction: see the module.
    Raises ValueError before any launch: wrong shapes or dtypes, a temperature that is not positive and finite, a selected id that is
    padded, out of range or outside its support, a support that holds a padded id. BackendUnavailable: the backend cannot run here.
    """
    return logp_with_lse(
        logits, ids, temperature, vocab_size=vocab_size, padded_vocab=padded_vocab, shards=shards, vocab_tile=vocab_tile,
        support=support, active=active, backend=backend,
    )[0]  # fmt: skip


def logp_with_lse(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    *,
    vocab_size: int,
    padded_vocab: int,
    shards: int = 8,
    vocab_tile: int = 1024,
    support: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`logp` and the LSE [T] fp32 of z/T over the support (natural log, not differentiable; +0 in inactive rows)."""
    if logits.dtype != torch.float32 or logits.ndim != 2:
        raise ValueError(f"logp: logits {tuple(logits.shape)} {logits.dtype} must be [T, width] float32")
    require_vocabulary("logp", logits.shape[1], vocab_size, padded_vocab, shards, vocab_tile)
    require_rows("logp", logits.shape[0], logits.shape[1], vocab_size, ids, temperature, support, active)
    implementation = select("logp", _FORWARD, backend, logits.device)
    result: tuple[torch.Tensor, torch.Tensor] = implementation(
        logits, ids, temperature, for_device(support, logits.shape[1]), active, vocab_size, padded_vocab, shards, vocab_tile
    )
    return result


def score_drawn(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    support: torch.Tensor | None,
    *,
    vocab_size: int,
    padded_vocab: int,
    shards: int,
    vocab_tile: int,
) -> torch.Tensor:
    """:func:`logp` of ids that a sampler drew from these very logits, with its own supports: no value is checked, so that the host does
    not wait for the device. Not differentiable."""
    implementation = select("logp", _FORWARD, None, logits.device)
    support = for_device(support, logits.shape[1])
    with torch.no_grad():
        score: torch.Tensor = implementation(logits, ids, temperature, support, None, vocab_size, padded_vocab, shards, vocab_tile)[0]
    return score


def for_device(support: torch.Tensor | None, width: int) -> torch.Tensor | None:
    """A support as the backend of its device reads it: the CPU's reads masks only, so bits become a mask [T, width] bool there."""
    if support is None or support.dtype == torch.bool or support.device.type != "cpu":
        return support
    mask = np.unpackbits(support.numpy(), axis=1, count=width, bitorder="little")
    return torch.from_numpy(mask).view(torch.bool)


def support_mask(supports: Sequence[Sequence[int] | None], vocab_size: int, *, width: int | None = None) -> torch.Tensor:
    """Mask [T, width] bool (width defaults to vocab_size) that holds each row's ids; None stands for every real column.

    Raises ValueError naming row and id for an id outside [0, vocab_size).
    """
    mask = torch.zeros(len(supports), vocab_size if width is None else width, dtype=torch.bool)
    mask[[ids is None for ids in supports], :vocab_size] = True
    listed = [() if ids is None else ids for ids in supports]
    rows = torch.repeat_interleave(torch.tensor([len(ids) for ids in listed], dtype=torch.int64))
    columns = torch.from_numpy(np.fromiter(chain.from_iterable(listed), np.int64))
    for at in ((columns < 0) | (columns >= vocab_size)).nonzero()[:1, 0].tolist():
        raise ValueError(f"support_mask: row {int(rows[at])} holds id {int(columns[at])}, outside the vocabulary of {vocab_size}")
    mask[rows, columns] = True
    return mask


def require_vocabulary(op: str, width: int, vocab_size: int, padded_vocab: int, shards: int, vocab_tile: int) -> None:
    """Raise ValueError unless the columns, the shards and the tiles fit the padded vocabulary."""
    if shards < 1 or shards & (shards - 1) or padded_vocab % shards:
        raise ValueError(f"{op}: shards={shards} must be a power of two that divides padded_vocab={padded_vocab}")
    if not 0 < vocab_size <= padded_vocab or width > padded_vocab or vocab_tile < 1:
        raise ValueError(f"{op}: vocab_size={vocab_size}, width={width}, vocab_tile={vocab_tile} do not fit padded_vocab={padded_vocab}")


def require_rows(
    op: str,
    rows: int,
    width: int,
    vocab_size: int,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    support: torch.Tensor | None,
    active: torch.Tensor | None,
) -> None:
    """Raise ValueError for arguments of a row that the kernel could not score, before it runs. Values of inactive rows are not read.

    No value of a card is read where it is trusted or a graph is captured; a row that selects nothing it supports then scores NaN.
    """
    bits, columns = False, width
    if support is not None and support.dtype == torch.uint8:
        bits, columns = True, max(-(-width // 8), *support.shape[1:])
    for name, tensor, shape, dtype in (
        ("ids", ids, (rows,), torch.int64),
        ("temperature", temperature, (rows,), torch.float32),
        ("support", support, (rows, columns), torch.uint8 if bits else torch.bool),
        ("active", active, (rows,), torch.bool),
    ):
        if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
            raise ValueError(f"{op}: {name} {tuple(tensor.shape)} {tensor.dtype} must be {shape} {dtype}, one per row of logits")
    if unread(ids):
        return
    scored = torch.arange(rows, device=ids.device) if active is None else active.nonzero()[:, 0]
    ids, temperature = ids[scored], temperature[scored]
    real = min(vocab_size, width)

    def refuse(bad: torch.Tensor, why: str) -> None:
        for at in bad.nonzero()[:1, 0].tolist():
            raise ValueError(f"{op}: row {int(scored[at])} selects id {int(ids[at])}, {why}")

    for at in (~(torch.isfinite(temperature) & (temperature > 0))).nonzero()[:1, 0].tolist():
        raise ValueError(
            f"{op}: row {int(scored[at])} has temperature {float(temperature[at])}: it must be positive and finite (score greedy at 1)"
        )
    refuse((ids < 0) | (ids >= real), f"outside the {real} real columns")
    if support is not None:
        padding = _unpacked(support[scored, vocab_size // 8 :])[:, vocab_size % 8 :] if bits else support[scored, vocab_size:]
        for at, column in padding.nonzero()[:1].tolist():
            raise ValueError(f"{op}: row {int(scored[at])} supports id {vocab_size + column}, padding of a vocabulary of {vocab_size}")
        held = (support[scored, ids >> 3] >> (ids & 7) & 1).bool() if bits else support[scored, ids]
        refuse(~held, "outside its own support")


def _unpacked(bits: torch.Tensor) -> torch.Tensor:
    """[T, 8·bytes] uint8 of [T, bytes]."""
    return (bits[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=bits.device) & 1).flatten(1)
