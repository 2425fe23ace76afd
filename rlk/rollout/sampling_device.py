"""The strict sampler on a card: a whole step at once by the rule of ``rlk.kernels.sampling``, scored by the logp operator, without one wait
of the host for the device.

Parameters go to the card in one copy that the host does not wait for; ids, logprobs and supports stay there. :class:`SupportLog` brings
supports to pinned host memory as bits while the next step runs; ids are listed only for who asks. Logits that are not finite are noted on
the card and raised by :meth:`DeviceSampler.check`, once per generation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from rlk.contract.numerics import Numerics
from rlk.contract.sampling import SamplingParams
from rlk.kernels.logp import score_drawn
from rlk.kernels.sampling import Rows, fixed_point, sample

FIELDS = 5
COPIES = 4
"""Steps whose parameters may be on their way to the card at once."""
_LISTED = 256
"""Rows whose retained ids are listed together."""


class Reached:
    """A point in the work of a device that the host can wait for; without a card everything is done at once."""

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def mark(self) -> None:
        """The point is what was asked of the current stream so far."""
        if self._event is not None:
            self._event.record()

    def wait(self) -> None:
        """Until the point that was marked last."""
        if self._event is not None:
            self._event.synchronize()


@dataclass(frozen=True)
class Staged:
    """Parameters of one step on the card, and what the host knows of them: which kernels the step needs."""

    rows: Rows
    by_count: bool
    by_weight: bool


@dataclass(frozen=True)
class DeviceSample:
    """Tokens of one step, on the card: ids [S] int64, logprobs [S] fp32, and support [S, padded_vocab/8] uint8, bit j of byte i for id
    8i + j; None when no row truncates. A row that does not truncate retains every id."""

    ids: torch.Tensor
    logprobs: torch.Tensor
    support: torch.Tensor | None


class DeviceSampler:
    """Draws and scores steps of up to ``max_rows`` rows. device: a card.

    A row's bytes depend on its logits and parameters alone. :meth:`sample` can be captured in a graph: a replay reads the parameters that
    were staged last and uses limits of the kinds that the captured step used.
    """

    def __init__(self, max_rows: int, vocab_size: int, padded_vocab: int, numerics: Numerics, device: torch.device) -> None:
        self.max_rows, self.vocab_size, self.padded_vocab, self.numerics = max_rows, vocab_size, padded_vocab, numerics
        size = 8 * FIELDS * max_rows
        self._device_rows = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host = deque((torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda"), Reached(device)) for _ in range(COPIES))
        self._failed = torch.zeros(3, dtype=torch.int64, device=device)
        self._params: Sequence[SamplingParams] = ()
        self._words = np.zeros((FIELDS, max_rows), dtype=np.int64)
        self._kinds = {"by_count": False, "by_weight": False}

    def stage(self, params: Sequence[SamplingParams], positions: Sequence[int]) -> Staged:
        """Send the parameters of a step's rows to the card. positions: index of the token in each row's response.

        The same tuple of params as in the step before is not looked at again. The host waits only for the copy of four steps ago.
        Raises ValueError for more than max_rows rows or other counts of positions.
        """
        count = len(params)
        if count > self.max_rows or count != len(positions):
            raise ValueError(f"{count} rows and {len(positions)} positions for a sampler of at most {self.max_rows} rows")
        host, sent = self._host[0]
        self._host.rotate(-1)
        sent.wait()
        if params is not self._params or not isinstance(params, tuple):
            self._describe(params)
        self._words[3, :count] = positions
        host.view(torch.int64).numpy()[:] = self._words.reshape(-1)
        self._device_rows.copy_(host, non_blocking=True)
        sent.mark()
        return Staged(self._rows(count), **self._kinds)

    def _describe(self, params: Sequence[SamplingParams]) -> None:
        count, words = len(params), self._words
        words[0, :count] = [fixed_point(p.top_p) for p in params]
        words[1, :count] = [0 if p.greedy else p.top_k for p in params]
        words[2, :count] = [p.seed for p in params]
        words[4].view(np.float32)[:count] = [p.scoring_temperature for p in params]
        self._kinds["by_count"] = any(p.truncates and p.top_k > 0 for p in params)
        self._kinds["by_weight"] = any(p.truncates and p.top_p < 1 for p in params)
        self._params = params

    def _rows(self, count: int) -> Rows:
        words = self._device_rows.view(torch.int64).view(FIELDS, self.max_rows)
        return Rows(words[4].view(torch.float32)[:count], *(words[i, :count] for i in range(4)))

    def sample(self, logits: torch.Tensor, staged: Staged) -> DeviceSample:
        """Draw and score one token per row of ``logits`` [S, width] fp32, vocab_size <= width <= padded_vocab; nothing is waited for."""
        drawn = sample(
            logits, staged.rows, self._failed, vocab_size=self.vocab_size, padded_vocab=self.padded_vocab, by_count=staged.by_count,
            by_weight=staged.by_weight,
        )  # fmt: skip
        logprobs = score_drawn(
            logits, drawn.ids, staged.rows.temperature, drawn.support, vocab_size=self.vocab_size, padded_vocab=self.padded_vocab,
            shards=self.numerics.canonical_tp, vocab_tile=self.numerics.vocab_tile,
        )  # fmt: skip
        return DeviceSample(drawn.ids, logprobs, drawn.support)

    def check(self) -> None:
        """Wait for the card and raise for a row since the last check, by name: FloatingPointError if its logits were not finite,
        RuntimeError if a graph was replayed for it that was captured without its kind of limit."""
        kind, seed, position = self._failed.tolist()
        self._failed.zero_()
        row = f"the row with seed {seed} at position {position}"
        if kind == 1:
            raise FloatingPointError(f"logits of {row} are not finite once divided by its temperature")
        if kind == 2:
            raise RuntimeError(f"{row} truncates, which its graph does not: capture one with rows that have top_k and top_p")


class SupportLog:
    """Supports on their way to the host and there: bits in pinned memory, by tag.

    block_rows: rows of one block of pinned memory; blocks are kept for the next generation.
    """

    def __init__(self, vocab_size: int, padded_vocab: int, device: torch.device, block_rows: int = 4096) -> None:
        self._width, self._vocab, self._block_rows = padded_vocab // 8, vocab_size, block_rows
        self._blocks: list[torch.Tensor] = []
        self._used, self._places = 0, dict[Hashable, int]()
        self._unlisted: list[tuple[int, Sequence[Hashable | None]]] = []
        self._arrived = Reached(device)

    def clear(self) -> None:
        """Forget every support; the memory is kept."""
        self._used, self._places, self._unlisted = 0, {}, []

    def put(self, support: torch.Tensor, tags: Sequence[Hashable | None]) -> None:
        """Bring the rows of ``support`` to the host, not waiting for it; a row with tag None is forgotten."""
        count = len(support)
        if count > self._block_rows:
            raise ValueError(f"{count} rows do not fit a block of {self._block_rows}: raise block_rows")
        block, at = divmod(self._used, self._block_rows)
        if at + count > self._block_rows:
            block, at = block + 1, 0
        if block == len(self._blocks):
            self._blocks.append(torch.empty(self._block_rows, self._width, dtype=torch.uint8, pin_memory=support.is_cuda))
        self._blocks[block][at : at + count].copy_(support, non_blocking=True)
        self._arrived.mark()
        self._used = block * self._block_rows + at + count
        self._unlisted.append((self._used - count, tags))

    def tags(self) -> Collection[Hashable]:
        """Every tag that has a row, in the order of :meth:`put`."""
        for first, tags in self._unlisted:
            self._places.update({tag: first + i for i, tag in enumerate(tags) if tag is not None})
        self._unlisted = []
        return self._places.keys()

    def bits(self, tag: Hashable) -> NDArray[np.uint8]:
        """[padded_vocab/8] uint8 of one row; waits for it. Raises KeyError for an unknown tag."""
        self.tags()
        block, at = divmod(self._places[tag], self._block_rows)
        self._arrived.wait()
        row: NDArray[np.uint8] = self._blocks[block][at].numpy()
        return row

    def ids(self, tag: Hashable) -> tuple[int, ...]:
        """Retained ids of one row, ascending; waits for it."""
        return tuple(self._listed(self.bits(tag)[None])[0])

    def listed(self) -> dict[Hashable, list[int]]:
        """Retained ids of every tag, ascending; waits for all of them."""
        tags = list(self.tags())
        self._arrived.wait()
        found: dict[Hashable, list[int]] = {}
        for first in range(0, len(tags), _LISTED):
            held = tags[first : first + _LISTED]
            places = np.array([self._places[tag] for tag in held])
            rows = np.empty((len(held), self._width), dtype=np.uint8)
            for block in np.unique(places // self._block_rows):
                here = places // self._block_rows == block
                rows[here] = self._blocks[block].numpy()[places[here] % self._block_rows]
            found.update(zip(held, self._listed(rows), strict=True))
        return found

    def _listed(self, rows: NDArray[np.uint8]) -> list[list[int]]:
        """Ids of the bits of each row, ascending. Most words of a row are empty: bits are looked for in the others alone."""
        words = rows.view(np.uint64)
        row, word = np.nonzero(words)
        at, bit = np.nonzero(np.unpackbits(words[row, word].view(np.uint8).reshape(-1, 8), axis=1, bitorder="little"))
        ids = word[at] * 64 + bit
        real = ids < self._vocab
        ends = np.searchsorted(row[at][real], np.arange(len(rows) + 1)).tolist()
        flat: list[int] = ids[real].tolist()
        return [flat[start:end] for start, end in pairwise(ends)]
