"""Canonical collectives over one group of ranks: the transport gathers or exchanges bytes, the pair tree adds them in fp32.

A rank's part of a sum is the root of a whole subtree (``rlk.contract.topology.owned``), so adding the ranks' parts by the tree of adjacent
pairs is the same arithmetic as adding all shards or leaves on one rank. Neither the transport nor the size or number of its messages can
change a byte, because neither adds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from rlk.contract.orders import fold_pairs
from rlk.parallel.link import Link
from rlk.parallel.peer import Peer
from rlk.parallel.transport import Gloo, Ipc, Nccl, Shm, Transport

MOVERS: dict[Transport, type[Gloo]] = {"gloo": Gloo, "shm": Shm, "ipc": Ipc, "nccl": Nccl, "peer": Peer}

_ALIGN = 16
BUCKET_ELEMENTS = 1 << 24
"""fp32 elements of the largest joint buffer of :meth:`Group.tree_all_reduce_many`; any number gives the same bytes."""


class Group:
    """Ranks along one axis of the topology, in the order of their shards or leaves. In a group of one nothing is sent.

    name: "tp", "cp" or "world". handle: the process group whose ranks are in that order. Every method is called by all ranks of the group
    in the same order; it raises PeerLostError if one of them is lost, MismatchError if they differ in shapes or dtypes.
    """

    def __init__(self, name: str, link: Link, handle: dist.ProcessGroup) -> None:
        self.name, self.link = name, link
        self.rank, self.size = dist.get_rank(handle), dist.get_world_size(handle)
        self.members = tuple(dist.get_process_group_ranks(handle))
        self._handle = handle
        self._mover = MOVERS[link.transport](link, handle) if self.size > 1 else None

    def all_gather_many(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Every rank's tensors, [ranks, *shape] each, in one call. Shapes, dtypes and the one device are those of all ranks."""
        if self.size == 1:
            return [tensor.unsqueeze(0) for tensor in tensors]
        self._check("all_gather_many", tensors)
        return _unpack(self._gather(_pack(tensors)), tensors)

    def tree_reduce_scatter(self, part: torch.Tensor) -> torch.Tensor:
        """This rank's piece of the sum over ranks, fp32: piece r of the flattened sum, filled with +0 to a multiple of the group's size.

        part: fp32, the same shape on every rank. Order: tree of adjacent pairs over ranks, in fp32.
        """
        if part.dtype != torch.float32:
            raise ValueError(f"{self.name}: tree sums are fp32, got {part.dtype}: hand over the unrounded part")
        if self.size == 1:
            return part.reshape(-1)
        self._check("tree_reduce_scatter", [part])
        width = -(-part.numel() // self.size)
        flat, missing = part.reshape(-1), width * self.size - part.numel()
        rows = (torch.cat([flat, flat.new_zeros(missing)]) if missing else flat).view(self.size, width)
        sums = [fold_pairs(list(self._exchange(rows[:, columns])), torch.add) for columns in self._messages(width, part.element_size())]
        return sums[0] if len(sums) == 1 else torch.cat([rows.new_empty(0), *sums])

    def tree_all_reduce(self, part: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The sum over ranks on every rank, in the shape of ``part`` (fp32), rounded once to ``dtype`` at the root of the tree.

        Each piece is added and rounded by one rank (:meth:`tree_reduce_scatter`), then gathered as it is; where few bytes make calls dearer
        than bytes, every rank gathers all parts and adds them itself, which is the same arithmetic.
        """
        if self._mover is None:
            return self.tree_reduce_scatter(part).to(dtype).reshape(part.shape)
        if isinstance(self._mover, Peer) and part.is_cuda and part.dtype == torch.float32 and dtype in (torch.float32, torch.bfloat16):
            mover = self._mover
            self._check("tree_all_reduce", [part])
            return self.link.run(lambda: mover.tree_sum(part, dtype), self.name, "tree_all_reduce", mover.bytes_sent(part, dtype))
        if part.dtype == torch.float32 and 0 < part.nbytes <= self._mover.whole_below:
            (parts,) = self.all_gather_many([part])
            return fold_pairs(list(parts), torch.add).to(dtype)
        (pieces,) = self.all_gather_many([self.tree_reduce_scatter(part).to(dtype)])
        return pieces.view(-1)[: part.numel()].reshape(part.shape)

    def tree_all_reduce_many(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """:meth:`tree_all_reduce` of several fp32 tensors in few calls."""
        if self.size == 1:
            return list(parts)
        sums: list[torch.Tensor] = []
        for bucket in _buckets(parts):
            joined = self.tree_all_reduce(torch.cat([part.reshape(-1) for part in bucket]))
            pieces = joined.split([part.numel() for part in bucket])
            sums += [piece.reshape(part.shape) for piece, part in zip(pieces, bucket)]
        return sums

    def _check(self, op: str, tensors: Sequence[torch.Tensor]) -> None:
        if self.link.checking:
            shapes = ", ".join(f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in tensors)
            self.link.agree(f"{op} on {self.name}", f"{op} of {shapes}", self._handle)

    def _messages(self, count: int, item: int = 1) -> Iterator[slice]:
        each = max(1, self.link.message_bytes // (item * self.size))
        return (slice(at, min(at + each, count)) for at in range(0, count, each))

    def _gather(self, packed: torch.Tensor) -> torch.Tensor:
        """[ranks, bytes] of all ranks' [bytes]."""
        rows = [self._gathered(packed[columns]) for columns in self._messages(packed.numel())]
        return rows[0] if len(rows) == 1 else torch.cat([packed.new_empty(self.size, 0), *rows], dim=1)

    def _gathered(self, piece: torch.Tensor) -> torch.Tensor:
        assert self._mover is not None
        mover = self._mover
        return self.link.run(lambda: mover.gather(piece), self.name, "all_gather", (self.size - 1) * piece.nbytes)

    def _exchange(self, rows: torch.Tensor) -> torch.Tensor:
        """Row r of [ranks, n] goes to rank r."""
        assert self._mover is not None
        mover, sent = self._mover, rows.contiguous()
        return self.link.run(lambda: mover.exchange(sent), self.name, "all_to_all", (self.size - 1) * sent[0].nbytes)


class _Alone(Group):
    def __init__(self) -> None:
        self.name, self.rank, self.size, self.members = "alone", 0, 1, (0,)
        self._mover = None


ALONE: Group = _Alone()
"""A group of one for a process that has joined no job: nothing is sent, and it has no link."""


def _pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All bytes in one vector, each tensor at a multiple of 16."""
    pieces = []
    for tensor in tensors:
        raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        pieces += [raw, raw.new_zeros(-raw.numel() % _ALIGN)] if raw.numel() % _ALIGN else [raw]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _unpack(joined: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Inverse of :func:`_pack` for the rows of every rank, [ranks, bytes]."""
    result, at = [], 0
    for tensor in like:
        size = tensor.numel() * tensor.element_size()
        result.append(joined[:, at : at + size].reshape(-1).view(tensor.dtype).reshape(joined.shape[0], *tensor.shape))
        at += size + -size % _ALIGN
    return result


def _buckets(parts: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Consecutive tensors of at most BUCKET_ELEMENTS together, at least one."""
    held: list[torch.Tensor] = []
    for part in parts:
        if held and sum(p.numel() for p in held) + part.numel() > BUCKET_ELEMENTS:
            yield held
            held = []
        held.append(part)
    if held:
        yield held
