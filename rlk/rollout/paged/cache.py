"""Paged keys and values of one rank, and the whole of them in logical order where they are read.

Context parallel ranks interleave tokens: position p lives on rank p mod cp (``rlk.contract.topology.interleaved_positions``), as its
p // cp th token, in the same page of the same block table on every rank. So the pages of all ranks side by side are pages of cp times as
many tokens in logical order, and reading them only moves bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlk.model.config import Qwen3Config
from rlk.parallel.collectives import Group

CPU = torch.device("cpu")


class PagedCache:
    """Pages of ``page`` tokens per rank, for the KV heads of this rank; a page nobody has written holds NaN.

    span: positions of a sequence that one entry of its block table covers, page·cp. free: pages that no sequence holds.
    """

    def __init__(self, config: Qwen3Config, pages: int, page: int, tp: Group, cp: Group, device: torch.device = CPU) -> None:
        heads = config.num_key_value_heads // tp.size
        shape = (config.num_hidden_layers, pages, heads, page, 2 * config.head_dim)
        self.layers = torch.full(shape, float("nan"), dtype=torch.bfloat16, device=device)
        self.page, self.span, self.cp = page, page * cp.size, cp
        self.free = list(range(pages))

    def pages_for(self, tokens: int) -> int:
        """Entries of the block table of a sequence of ``tokens`` tokens."""
        return -(-tokens // self.span)

    def slots(self, blocks: Sequence[int], positions: Sequence[int]) -> list[int]:
        """Where this rank keeps its own positions of a sequence: page·tokens per page + place in the page."""
        return [blocks[p // self.span] * self.page + p % self.span // self.cp.size for p in positions]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep keys and values [T, Hk, D] at slots int64 [T]."""
        page, offset = slots // self.page, slots % self.page
        self.layers[layer, page, :, offset] = torch.cat([k, v], dim=2)

    def read(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """Pages ``blocks`` of all context parallel ranks, joined to [blocks, Hk, span, 2·D] in logical order."""
        (held,) = self.cp.all_gather_many([self.layers[layer, blocks]])
        return in_logical_order(held)


def in_logical_order(held: torch.Tensor) -> torch.Tensor:
    """[cp, pages, Hk, page, 2·D] of the ranks -> [pages, Hk, page·cp, 2·D]: token i of rank r is token i·cp + r."""
    return held.permute(1, 2, 3, 0, 4).flatten(2, 3)
