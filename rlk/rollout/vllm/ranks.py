"""vLLM's tensor parallel ranks as a group of canonical collectives."""

from __future__ import annotations

import functools
import json

import torch.distributed as dist
from vllm.distributed import get_tp_group

from rlk.contract.numerics import Numerics
from rlk.parallel.collectives import ALONE, Group
from rlk.parallel.link import Link
from rlk.parallel.presence import Presence
from rlk.parallel.rendezvous import LOOPBACK, TIMEOUT


@functools.cache
def tensor_parallel(numerics: Numerics) -> Group:
    """The ranks of this worker's engine, over the processes and the transport that vLLM has connected. Every rank calls it, once vLLM has.

    Raises MismatchError on every rank unless all hold the same numerics of the same contract version.
    """
    ranks = get_tp_group()
    if ranks.world_size == 1:
        return ALONE
    store = dist.PrefixStore("rlk", dist.distributed_c10d._get_default_store())
    label = f"rollout rank {ranks.rank_in_group}"
    presence = Presence(store, ranks.rank_in_group, ranks.world_size, label, host=LOOPBACK, grace=TIMEOUT)
    link = Link(presence)
    link.agree("agreement", json.dumps(numerics.as_dict()))
    return Group("tp", link, ranks.cpu_group)
