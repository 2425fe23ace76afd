"""Cells of the ws2 scope on the rollout side: any TP and CP generates the tokens and logprob bytes that any training topology scores."""

from __future__ import annotations

from collections.abc import Iterator

from rlk.acceptance.cell import Cell
from rlk.acceptance.platforms import Platform
from rlk.acceptance.ws2 import MODEL

TOPOLOGIES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1))
"""Rollout (tp, cp), each against training at (1, 1) and against another process at (1, 1)."""
PAIRS = (((4, 2), (8, 1)), ((2, 4), (1, 8)), ((8, 1), (2, 2)), ((1, 8), (4, 2)), ((2, 2), (2, 4)))
"""Training and rollout (tp, cp): the trainer has learned and published there, the rollout serves it elsewhere, the trainer scores."""
FAULTS = ("rollout_ring_order", "rollout_rank_order")
"""Planted on purpose: sums over ranks in plain ring order; keys and values left in the order of the ranks that hold them."""

_SHARED = ("embedding", "rms_norm", "qk_norm", "rope", "det_gemm", "swiglu", "lm_head", "logp")
STRICT = (*(("rollout", op) for op in (*_SHARED, "attention.paged")), *(("train", op) for op in (*_SHARED, "attention")))
"""What every rank must report to have run."""
FACTS = (
    "topology", "ranks", "partition", "communication", "reduction_order", "traffic_per_update", "tokens_compared", "model_hashes",
    "empty_shards",
)  # fmt: skip


def subject(rollout: tuple[int, int], train: tuple[int, int] | None = None) -> str:
    """How cells name a rollout topology, or a pair of topologies."""
    name = "rollout-tp{}cp{}".format(*rollout)
    return name if train is None else "train-tp{}cp{}-".format(*train) + name


def rollout_of(name: str) -> tuple[int, int]:
    """Rollout (tp, cp) of a topology cell's subject."""
    return next(pair for pair in TOPOLOGIES if subject(pair) == name)


def pair_of(name: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Training and rollout (tp, cp) of a pair cell's subject."""
    return next((train, rollout) for train, rollout in PAIRS if subject(rollout, train) == name)


def ws2_rollout_cells(platform: Platform) -> Iterator[Cell]:
    """Every cell of the rollout side on one platform, topologies in order, then pairs, then planted faults."""
    workload = f"{MODEL[platform].name}-mixed"
    tokens = ("token ids", "retained ids", "logprob")
    for pair in TOPOLOGIES:
        ranks = tuple(f"rank {rank}" for rank in range(pair[0] * pair[1]))
        for judgment, names in (("rollout_logprob", (*tokens, *ranks)), ("rollout_weights", ("model", *ranks))):
            yield Cell(platform, "ws2", subject(pair), workload, judgment, strict=STRICT, facts=FACTS, names=names)
    for train, rollout in PAIRS:
        ranks = tuple(f"rollout rank {rank}" for rank in range(rollout[0] * rollout[1]))
        ranks += tuple(f"train rank {rank}" for rank in range(train[0] * train[1]))
        names = ("logprob", "model", *ranks)
        yield Cell(platform, "ws2", subject(rollout, train), workload, "pair_logprob", strict=STRICT, facts=FACTS, names=names)
    for fault in FAULTS:
        yield Cell(platform, "ws2", fault, workload, "caught", expect="caught")
