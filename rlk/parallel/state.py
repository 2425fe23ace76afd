"""One process's place in a (TP, CP) topology and the groups along its two axes."""

from __future__ import annotations

from dataclasses import dataclass

from rlk.contract.topology import Topology
from rlk.parallel.collectives import Group
from rlk.parallel.link import Link


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
