"""One process's place in a (TP, CP) topology and the groups along its two axes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from rlk.contract.topology import Topology
from rlk.parallel.collectives import Group
from rlk.parallel.link import Link
from rlk.parallel.rendezvous import TIMEOUT, Transport, join


@dataclass(frozen=True)
class Parallel:
    """tp: ranks in the order of their shards. cp: ranks in the order of their token leaves."""

    topology: Topology
    link: Link
    tp: Group
    cp: Group

    @property
    def shards(self) -> range:
        """Canonical shards of this rank."""
        return self.topology.train_shards(self.tp.rank)

    @property
    def leaves(self) -> range:
        """Token leaves of this rank."""
        return self.topology.train_leaves(self.cp.rank)

    @property
    def alone(self) -> bool:
        """True in a world of one process."""
        return self.topology.train_ranks == 1


def rank_label(rank: int, topology: Topology) -> str:
    """How errors and reports name a rank; ranks count TP first, as Megatron-core does."""
    return f"rank {rank} (tp {rank % topology.tp}, cp {rank // topology.tp})"


def join_topology(rank: int, topology: Topology, port: int = 0, timeout: float = TIMEOUT, transport: Transport = "gloo") -> Link:
    """Join the job of a topology's tp·cp ranks; they must agree in topology, contract version and numerics.

    Other arguments and errors: :func:`rlk.parallel.rendezvous.join`.
    """
    labels = [rank_label(r, topology) for r in range(topology.train_ranks)]
    agreement = json.dumps({"tp": topology.tp, "cp": topology.cp, **topology.numerics.as_dict()})
    return join(rank, labels, port, agreement, transport=transport, timeout=timeout)


def enter(rank: int, topology: Topology, port: int = 0, timeout: float = TIMEOUT, transport: Transport = "gloo") -> Parallel:
    """:func:`join_topology`, and the groups along both axes. An engine that builds groups of its own joins without them."""
    link = join_topology(rank, topology, port, timeout, transport)
    tp, cp = topology.tp, topology.cp
    rows = _group("tp", link, [range(first, first + tp) for first in range(0, tp * cp, tp)], timeout)
    columns = _group("cp", link, [range(first, tp * cp, tp) for first in range(tp)], timeout)
    return Parallel(topology, link, rows, columns)


def _group(name: str, link: Link, members: Sequence[range], timeout: float) -> Group:
    """This rank's group; every rank makes all of them, in order."""
    made = [dist.new_group(list(ranks), timeout=timedelta(seconds=timeout)) for ranks in members]
    return next(Group(name, link, handle) for handle, ranks in zip(made, members) if link.rank in ranks)
