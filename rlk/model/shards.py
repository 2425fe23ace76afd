"""Which part of a packed weight a tensor parallel rank holds, and whole tensors from the parts of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import torch

from rlk.parallel.collectives import Group

DIMENSION = {"qkv": 0, "gate_up": 0, "embedding": 0, "lm_head": 0, "o_proj": 1, "down_proj": 1}
"""Dimension along which tensor parallelism cuts a weight, by the last part of its packed name; all others are replicated."""


def dimension(name: str) -> int | None:
    """Dimension of the cut of packed weight ``name``, None for a replicated one."""
    return DIMENSION.get(name.rsplit(".", 1)[-1])


def part(name: str, whole: torch.Tensor, tp: Group) -> torch.Tensor:
    """This rank's shards of a whole packed tensor: one run of adjacent rows or columns."""
    cut = dimension(name)
    return whole if cut is None or tp.size == 1 else whole.chunk(tp.size, cut)[tp.rank].contiguous()


def part_shape(name: str, shape: Sequence[int], tp: Group) -> tuple[int, ...]:
    """Shape of a rank's part of a whole tensor of ``shape``."""
    cut = dimension(name)
    return tuple(size // tp.size if at == cut else size for at, size in enumerate(shape))


def whole_shape(name: str, shape: torch.Size, tp: Group) -> tuple[int, ...]:
    """Shape of the whole tensor of which this rank's part has ``shape``."""
    cut = dimension(name)
    return tuple(size * tp.size if at == cut else size for at, size in enumerate(shape))


def whole(parts: Mapping[str, torch.Tensor], tp: Group) -> dict[str, torch.Tensor]:
    """Whole tensors by name, in the same order; one collective per layer, which all ranks of the group call."""
    found = dict(each_whole(parts, tp))
    return {name: found[name] for name in parts}


def each_whole(parts: Mapping[str, torch.Tensor], tp: Group) -> Iterator[tuple[str, torch.Tensor]]:
    """:func:`whole`, tensor by tensor, so that no more than a layer need be held; first what lies outside the layers, which is largest."""
    runs = [list(names) for _, names in groupby(parts, lambda name: name.rpartition(".")[0])]
    for layer in sorted(runs, key=lambda names: "." in names[0]):
        cut = [name for name in layer if tp.size > 1 and dimension(name) is not None]
        gathered = dict(zip(cut, tp.all_gather_many([parts[name] for name in cut]) if cut else ()))
        for name in layer:
            yield name, torch.cat(list(gathered.pop(name)), dim=dimension(name) or 0) if name in gathered else parts[name]
