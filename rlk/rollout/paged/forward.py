"""The tensors of one step on one rank, and attention over the paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk.contract.numerics import Numerics
from rlk.contract.topology import interleaved_positions
from rlk.kernels.attention import paged_attention
from rlk.model.config import Qwen3Config
from rlk.rollout.paged.cache import PagedCache
from rlk.rollout.paged.schedule import Piece


class Step:
    """This rank's rows of a step: of every piece, in order, the positions whose keys it keeps.

    ids, positions: int64 [T]. ready: the pieces after which a token is drawn. owners: for each of them, the CP rank that holds its last
    position. last: int64, the rows of those that this rank holds.
    """

    def __init__(self, pieces: Sequence[Piece], cache: PagedCache, config: Qwen3Config, numerics: Numerics) -> None:
        cp, self._cache = cache.cp, cache
        self._scale, self._numerics = config.attention_scale, numerics
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tables: list[list[int]] = []
        visible: list[int] = []
        last: list[int] = []
        self.ready = [piece for piece in pieces if piece.last]
        self.owners = [(piece.stop - 1) % cp.size for piece in self.ready]
        for piece in pieces:
            running = piece.running
            own = [p for p in interleaved_positions(piece.stop, cp.size, cp.rank) if p >= piece.start]
            seen = running.blocks[: cache.pages_for(piece.stop)]
            # Several ranks: the step reads a copy of all visible pages, one sequence after another.
            table = seen if cp.size == 1 else list(range(len(visible), len(visible) + len(seen)))
            visible += seen
            ids += [running.ids[p] for p in own]
            positions += own
            slots += cache.slots(running.blocks, own)
            tables += [table] * len(own)
            if piece.last and (piece.stop - 1) % cp.size == cp.rank:
                last.append(len(ids) - 1)
        device = cache.layers.device
        integers = lambda values: torch.tensor(values, dtype=torch.int64, device=device)
        self.ids, self.positions, self.last = integers(ids), integers(positions), integers(last)
        self._slots, self._visible = integers(slots), integers(visible)
        width = max((len(table) for table in tables), default=1)
        # Rows of a rank are no neighbours, so each is a sequence of its own whose last token it is. Entries behind it are never read.
        filled = [table + [-1] * (width - len(table)) for table in tables]
        self._table = torch.tensor(filled, dtype=torch.int32, device=device).reshape(len(ids), width)
        self._starts = torch.arange(len(ids) + 1, device=device)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Keep k and v [T, Hk, D], then attend q [T, Hq, D] over everything up to each row's position: [T, Hq·D]."""
        self._cache.write(layer, self._slots, k, v)
        kv = self._cache.layers[layer] if self._cache.cp.size == 1 else self._cache.read(layer, self._visible)
        return paged_attention(
            q, kv, self._table, self._starts, self.positions + 1,
            scale=self._scale, kv_tile=self._numerics.kv_tile, kv_split=self._numerics.kv_split,
            backend=self._numerics.attention_backend(q.device.type),
        ).flatten(1)  # fmt: skip
