"""logp of a rank that holds some vocabulary shards, outside autograd; joined over ranks the bytes equal :func:`rlk.kernels.logp.logp`.

Nothing is added across ranks but states: every rank gives the state of its own shards (:func:`part`), all parts are gathered, and
:func:`join` goes on with the tree of adjacent pairs over ranks. The gradient needs only the joined LSE (:func:`gradient`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlk.contract.numerics import is_power_of_two
from rlk.kernels._triton import from_triton
from rlk.kernels.checked import unread
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.logp import cpu

_PART: Backends = {"cpu": cpu.part, "triton": from_triton("logp", "part")}
_JOIN: Backends = {"cpu": cpu.join, "triton": from_triton("logp", "join")}
_GRADIENT: Backends = {"cpu": cpu.part_gradient, "triton": from_triton("logp", "part_gradient")}


@dataclass(frozen=True)
class Columns:
    """The columns of one rank: ``shards`` adjacent canonical shards of ``shard_width`` columns from column ``first``.

    vocab_size: real columns of the whole vocabulary; a rank may hold none of them.
    """

    first: int
    shards: int
    shard_width: int
    vocab_size: int

    def __post_init__(self) -> None:
        if not is_power_of_two(self.shards) or self.shard_width < 1 or self.first < 0 or self.first % self.width:
            raise ValueError(f"logp: {self} must be a power of two of whole shards that starts at a multiple of its width")

    @property
    def width(self) -> int:
        """Columns of the rank."""
        return self.shards * self.shard_width

    @property
    def real(self) -> int:
        """Real columns of the rank; the others are padding."""
        return min(max(self.vocab_size - self.first, 0), self.width)


def part(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, columns: Columns, *,
    vocab_tile: int, support: torch.Tensor | None = None, active: torch.Tensor | None = None, backend: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """What the rank adds, [T, 3] fp32: maximum and sum of its own columns' state, and z/T of the selected column where it holds it.

    logits: [T, columns.width] fp32. ids: [T] int64 in the whole vocabulary. temperature: [T] fp32. support: [T, columns.width] bool, the
    rank's part of it, which may be empty. active: [T] bool. Order: that of ``rlk.kernels.logp`` inside the rank's shards.
    Raises ValueError on a wrong shape or dtype; ids, temperatures and supports are checked by whoever knows all shards.
    """
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.shape[1] != columns.width:
        raise ValueError(f"logp: logits {tuple(logits.shape)} {logits.dtype} must be float32 [T, {columns.width}]")
    _require("ids", ids, (len(logits),), torch.int64)
    _require("temperature", temperature, (len(logits),), torch.float32)
    _require("support", support, tuple(logits.shape), torch.bool)
    _require("active", active, (len(logits),), torch.bool)
    result: torch.Tensor = select("logp", _PART, backend, logits.device)(logits, ids, temperature, support, active, columns, vocab_tile)
    return result


def join(
    parts: torch.Tensor, ids: torch.Tensor, columns: Columns, *, active: torch.Tensor | None = None, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """logp and LSE, [T] fp32 each, from the parts [ranks, T, 3] of all ranks in shard order; every rank is as wide as ``columns``.

    Raises ValueError on a wrong shape and for a selected id that no rank holds, whose row has no meaning where ids are unread.
    """
    if parts.dtype != torch.float32 or parts.ndim != 3 or parts.shape[2] != 3 or not is_power_of_two(len(parts)):
        raise ValueError(f"logp: parts {tuple(parts.shape)} {parts.dtype} must be float32 [ranks, T, 3]")
    _require("ids", ids, (parts.shape[1],), torch.int64)
    if not unread(ids):
        chosen = ids if active is None else ids[active]
        if bool(((chosen < 0) | (chosen >= columns.vocab_size)).any()):
            raise ValueError(f"logp: a selected id lies outside the {columns.vocab_size} real columns")
    logp, lse = select("logp", _JOIN, backend, parts.device)(parts, ids, active, columns.width)
    return logp, lse


def gradient(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, lse: torch.Tensor, seed: torch.Tensor, columns: Columns, *,
    support: torch.Tensor | None = None, active: torch.Tensor | None = None, backend: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """The rank's columns of dlogits, fp32 [T, columns.width] holding bf16 values; arguments as in :func:`part`, lse from :func:`join`."""
    run = select("logp.backward", _GRADIENT, backend, logits.device)
    result: torch.Tensor = run(logits, ids, temperature, support, active, lse, seed, columns)
    return result


def _require(name: str, tensor: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tensor is not None and (tuple(tensor.shape) != shape or tensor.dtype != dtype):
        raise ValueError(f"logp: {name} {tuple(tensor.shape)} {tensor.dtype} must be {shape} {dtype}, one per row of logits")
