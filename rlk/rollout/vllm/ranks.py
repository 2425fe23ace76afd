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
from rlk.parallel.transport import Transport


@functools.cache
def tensor_parallel(numerics: Numerics, transport: Transport) -> Group:
    """The ranks of this worker's engine, between the processes that vLLM has connected. Every rank calls it, once vLLM has.

    transport: gloo on the CPU; on cards nccl or peer, both also inside a captured graph.
    Raises MismatchError on every rank unless all hold the same numerics of the same contract version.
    """
    ranks = get_tp_group()
    if ranks.world_size == 1:
        return ALONE
    store = dist.PrefixStore("rlk", dist.distributed_c10d._get_default_store())
    label = f"rollout rank {ranks.rank_in_group}"
    presence = Presence(store, ranks.rank_in_group, ranks.world_size, label, host=LOOPBACK, grace=TIMEOUT)
    link = Link(presence, transport=transport, host=ranks.cpu_group)
    link.agree("agreement", json.dumps(numerics.as_dict()))
    link.checking = transport == "gloo"  # a graph is captured on all ranks at once and replayed without the host
    return Group("tp", link, ranks.device_group if transport == "nccl" else ranks.cpu_group)
