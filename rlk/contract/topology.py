"""Who owns which shard, leaf and chunk under any TP and CP, and the order of tokens in weight gradients.

All results are plain integers: the same functions serve the engines, the operators' tests and the report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlk.contract.numerics import DEFAULT, ContractError, Numerics, ceil_to, is_power_of_two


@dataclass(frozen=True)
class TokenLeaves:
    """Token order of a weight gradient.

    index: token rows in accumulation order, -1 is a row of +0 (fill up to a whole group).
    offsets: leaf r is index[offsets[r] : offsets[r + 1]]; every offset is a multiple of the group.
    """

    index: tuple[int, ...]
    offsets: tuple[int, ...]


def block_size(length: int, canonical_cp: int = DEFAULT.canonical_cp) -> int:
    """Tokens w of each of the 2·canonical_cp blocks of a sequence: ceil(length / (2·canonical_cp)); raises ContractError below 1 token."""
    if length < 1:
        raise ContractError(f"sequence length {length} has no token: drop the sample before it is packed")
    return -(-length // (2 * canonical_cp))


def padded_length(length: int, canonical_cp: int = DEFAULT.canonical_cp) -> int:
    """Tokens of a sequence padded to 2·canonical_cp·w, the only padding at which zigzag chunks and leaves coincide."""
    return 2 * canonical_cp * block_size(length, canonical_cp)


def leaf_positions(length: int, leaf: int, canonical_cp: int = DEFAULT.canonical_cp) -> tuple[int, ...]:
    """Positions of one sequence in leaf ``leaf``: the real tokens of blocks leaf and 2·canonical_cp-1-leaf, ascending."""
    w = block_size(length, canonical_cp)
    mirror = 2 * canonical_cp - 1 - leaf
    first, second = (range(block * w, min((block + 1) * w, length)) for block in (leaf, mirror))
    return (*first, *second)


def token_leaves(
    lengths: Sequence[int], canonical_cp: int = DEFAULT.canonical_cp, group: int = DEFAULT.mma_k, starts: Sequence[int] | None = None
) -> TokenLeaves:
    """Order in which a weight gradient adds tokens.

    lengths: real tokens of each sample, samples in id order. starts: row of each sample's first token in the layout at hand
    (permuted or padded batches); by default samples are packed one after another.
    Leaf r holds, per sample in id order, :func:`leaf_positions`; each sample's piece is filled with -1 to a multiple of ``group``,
    so that groups restart at each sample. Every real token appears once, whether or not it carries loss.
    """
    first_rows = _packed_starts(lengths) if starts is None else starts
    if len(first_rows) != len(lengths):
        raise ContractError(f"{len(first_rows)} starts for {len(lengths)} samples: give one first row per sample")
    rows = [[[first + p for p in leaf_positions(n, r, canonical_cp)] for n, first in zip(lengths, first_rows)] for r in range(canonical_cp)]
    return _filled(rows, group)


def _packed_starts(lengths: Sequence[int]) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def _filled(rows: Sequence[Sequence[Sequence[int]]], group: int) -> TokenLeaves:
    """Join rows[leaf][sample] into one index, each piece filled to whole groups."""
    index: list[int] = []
    offsets = [0]
    for leaf in rows:
        for piece in leaf:
            index += [*piece, *[-1] * (ceil_to(len(piece), group) - len(piece))]
        offsets.append(len(index))
    return TokenLeaves(tuple(index), tuple(offsets))


def zigzag_positions(length: int, cp: int, rank: int, canonical_cp: int = DEFAULT.canonical_cp) -> tuple[int, ...]:
    """Positions of one padded sequence on a CP rank, in the rank's local order; positions >= length are padding.

    The padded sequence is cut into 2·cp chunks and the rank holds chunks rank and 2·cp-1-rank, as Megatron-core does.
    """
    _require_rank("cp", cp, canonical_cp, rank)
    chunk = padded_length(length, canonical_cp) // (2 * cp)
    return tuple(p for c in (rank, 2 * cp - 1 - rank) for p in range(c * chunk, (c + 1) * chunk))


def local_token_leaves(
    lengths: Sequence[int], cp: int, rank: int, canonical_cp: int = DEFAULT.canonical_cp, group: int = DEFAULT.mma_k
) -> TokenLeaves:
    """The canonical_cp/cp leaves of a CP rank, indexing the rank's own rows: per sample its :func:`zigzag_positions`, padding included.

    The leaves are the same tokens in the same order as leaves ``owned(cp, rank)`` of :func:`token_leaves`.
    """
    held = [zigzag_positions(n, cp, rank, canonical_cp) for n in lengths]
    first = _packed_starts([len(h) for h in held])
    row = [{p: start + i for i, p in enumerate(h)} for h, start in zip(held, first)]
    leaves = owned(cp, rank, canonical_cp)
    return _filled([[[at[p] for p in leaf_positions(n, r, canonical_cp)] for n, at in zip(lengths, row)] for r in leaves], group)


def interleaved_positions(length: int, cp: int, rank: int, canonical_cp: int = DEFAULT.canonical_cp) -> tuple[int, ...]:
    """Positions of one sequence whose keys and values a rollout CP rank holds: position p lives on rank p mod cp."""
    _require_rank("rollout_cp", cp, canonical_cp, rank)
    return tuple(range(rank, length, cp))


def restore_order(held: Sequence[Sequence[int]], length: int) -> tuple[int, ...]:
    """Where position p = 0 … length-1 sits in the ranks' rows joined in rank order; held[rank] lists positions (>= length: padding).

    Raises ContractError when a position is held twice or by nobody.
    """
    joined = [p for rank in held for p in rank]
    at = {p: i for i, p in enumerate(joined) if p < length}
    if sorted(p for p in joined if p < length) != list(range(length)):
        raise ContractError(f"the ranks do not hold positions 0 … {length - 1} exactly once each: cut the sequence again with one function")
    return tuple(at[p] for p in range(length))


def owned(ranks: int, rank: int, canonical: int = DEFAULT.canonical_tp) -> range:
    """Canonical shards (or leaves) of a rank: canonical/ranks adjacent ones, which is a whole subtree of the pair tree."""
    _require_rank("ranks", ranks, canonical, rank)
    each = canonical // ranks
    return range(rank * each, (rank + 1) * each)


def _require_rank(name: str, ranks: int, canonical: int, rank: int) -> None:
    _require_degree(name, ranks, canonical)
    if not 0 <= rank < ranks:
        raise ContractError(f"rank {rank} is outside {name}={ranks}: use 0 … {ranks - 1}")


def _require_degree(name: str, degree: int, canonical: int) -> None:
    if not is_power_of_two(degree) or canonical % degree:
        allowed = ", ".join(str(d) for d in range(1, canonical + 1) if is_power_of_two(d) and canonical % d == 0)
        raise ContractError(f"{name}={degree} does not divide the canonical {canonical} as a power of two: use one of {allowed}")


@dataclass(frozen=True)
class Topology:
    """Parallel degrees of the trainer (tp, cp) and of the rollout engine (rollout_tp, rollout_cp).

    Each is a power of two that divides the canonical value of ``numerics``; anything else raises ContractError.
    """

    tp: int = 1
    cp: int = 1
    rollout_tp: int = 1
    rollout_cp: int = 1
    numerics: Numerics = DEFAULT

    def __post_init__(self) -> None:
        for name in ("tp", "rollout_tp"):
            _require_degree(name, getattr(self, name), self.numerics.canonical_tp)
        for name in ("cp", "rollout_cp"):
            _require_degree(name, getattr(self, name), self.numerics.canonical_cp)

    def train_shards(self, tp_rank: int) -> range:
        """Canonical shards of a trainer TP rank."""
        return owned(self.tp, tp_rank, self.numerics.canonical_tp)

    def rollout_shards(self, tp_rank: int) -> range:
        """Canonical shards of a rollout TP rank."""
        return owned(self.rollout_tp, tp_rank, self.numerics.canonical_tp)

    def train_leaves(self, cp_rank: int) -> range:
        """Token leaves of a trainer CP rank."""
        return owned(self.cp, cp_rank, self.numerics.canonical_cp)

    @property
    def train_ranks(self) -> int:
        """Processes of the trainer."""
        return self.tp * self.cp

    @property
    def rollout_ranks(self) -> int:
        """Processes of the rollout engine."""
        return self.rollout_tp * self.rollout_cp
