"""Which tokens of which sequences the next step computes: continuous batches, long prompts in chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rlk.contract.records import Request
from rlk.rollout.paged.cache import PagedCache


@dataclass(eq=False)
class Running:
    """A request and what has become of it. limit: most tokens of prompt and response together. computed: tokens whose keys are kept."""

    request: Request
    limit: int
    ids: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    logprobs: list[float] = field(default_factory=list)
    supports: list[tuple[int, ...] | None] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def produced(self) -> int:
        """Response tokens so far."""
        return len(self.logprobs)


@dataclass(frozen=True)
class Piece:
    """Positions start … stop-1 of a sequence, computed in one step."""

    running: Running
    start: int
    stop: int

    @property
    def last(self) -> bool:
        """The piece ends with the newest token, so the next one is drawn after it."""
        return self.stop == len(self.running.ids)


class Scheduler:
    """First come, first served. A sequence is let in once the pages of its longest possible course are free, so none is ever put out.

    max_tokens: of one step, all sequences together. max_sequences: that are in at once. The same calls give the same steps on every rank.
    """

    def __init__(self, cache: PagedCache, max_tokens: int, max_sequences: int) -> None:
        self._cache, self._max_tokens, self._max_sequences = cache, max_tokens, max_sequences
        self._waiting: deque[Running] = deque()
        self._in: list[Running] = []

    def add(self, sequences: Sequence[Running]) -> None:
        """Queue sequences, each of which fits the cache by itself."""
        self._waiting.extend(sequences)

    def step(self) -> list[Piece]:
        """The pieces of the next step, older sequences first; empty when everything is finished."""
        budget = self._max_tokens
        pieces: list[Piece] = []
        while budget and (len(pieces) < len(self._in) or self._let_in()):
            running = self._in[len(pieces)]
            stop = min(len(running.ids), running.computed + budget)
            pieces.append(Piece(running, running.computed, stop))
            budget -= stop - running.computed
            running.computed = stop
        return pieces

    def finish(self, running: Running) -> None:
        """Let a sequence go and its pages with it."""
        self._in.remove(running)
        self._cache.free += running.blocks

    def _let_in(self) -> bool:
        """Let the next waiting sequence in, if there is one and room for it."""
        if not self._waiting or len(self._in) == self._max_sequences:
            return False
        need = self._cache.pages_for(self._waiting[0].limit)
        if need > len(self._cache.free):
            return False
        running = self._waiting.popleft()
        running.blocks = [self._cache.free.pop() for _ in range(need)]
        self._in.append(running)
        return True
