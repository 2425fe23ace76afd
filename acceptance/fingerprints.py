"""Fingerprints of tensors on a card: gigabytes are compared where they lie, a few bytes per canonical shard travel.

A fingerprint is two sums, Σ w·c(i) mod 2^64 over the words w of the raw bytes, whose coefficients c come from splitmix64 of the position.
Integer sums are exact in any order; two tensors that differ have equal fingerprints with a probability of 2^-128.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlk.model.shards import dimension
from rlk.parallel.collectives import Group

_WORDS: dict[int, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_AT_ONCE = 1 << 24
_STREAMS = (0, 1 << 40)


def fingerprints(tensors: Mapping[str, torch.Tensor], shards: int) -> dict[str, torch.Tensor]:
    """uint8 [shards, 16]: of each of the ``shards`` canonical shards held, or one of a replicated tensor; keys end in a packed name."""
    result = {}
    for name, tensor in tensors.items():
        cut = dimension(name)
        rows = tensor.detach()[None] if cut is None else tensor.detach().unflatten(cut, (shards, -1)).movedim(cut, 0)
        result[name] = torch.stack([_fingerprint(row.reshape(-1)) for row in rows])
    return result


def whole_fingerprints(parts: Mapping[str, torch.Tensor], tp: Group) -> dict[str, torch.Tensor]:
    """Those of all shards from the :func:`fingerprints` of every tensor parallel rank; all of them call it."""
    names = list(parts)
    gathered = tp.all_gather_many([parts[name] for name in names])
    return {name: rows[0] if dimension(name) is None else rows.flatten(0, 1) for name, rows in zip(names, gathered)}


def _fingerprint(flat: torch.Tensor) -> torch.Tensor:
    words = flat.view(_WORDS[flat.element_size()])
    sums = torch.zeros(len(_STREAMS), dtype=torch.int64, device=flat.device)
    for first in range(0, len(words), _AT_ONCE):
        piece = words[first : first + _AT_ONCE].long()
        at = torch.arange(first, first + len(piece), device=flat.device)
        sums += torch.stack([(piece * _coefficient(at + stream)).sum() for stream in _STREAMS])
    return sums.view(torch.uint8)


def _coefficient(at: torch.Tensor) -> torch.Tensor:
    """splitmix64 (Steele, Lea and Flood 2014) of int64 positions."""
    z = (at + 1) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
