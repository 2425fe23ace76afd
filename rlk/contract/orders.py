"""In which order numbers are added: groups, the pair tree over shards and leaves, the row tree, and the attention tiles and splits.

The two folds take the addition as an argument, so that one function joins fp32 partials, prints the order and drives its tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from rlk.contract.numerics import DEFAULT, ContractError, Numerics, is_power_of_two

T = TypeVar("T")

Order = Literal["plain", "split", "token"]
"""plain: one accumulator; split: canonical_tp shards joined by the pair tree; token: canonical_cp leaves joined by the pair tree."""


@dataclass(frozen=True)
class Contraction:
    """Orders of one linear layer y = x·wᵀ: forward over K, input gradient over N, weight gradient over tokens."""

    name: str
    forward: Order
    input_grad: Order
    weight_grad: Order = "token"


CONTRACTIONS = (
    Contraction("qkv", "plain", "split"),
    Contraction("o_proj", "split", "plain"),
    Contraction("gate_up", "plain", "split"),
    Contraction("down_proj", "split", "plain"),
    Contraction("lm_head", "plain", "split"),
)
"""The linear layers of the dense model. A direction is in split order exactly if some TP divides the dimension that it sums over."""


def groups(count: int, first: int = 0, group: int = DEFAULT.mma_k) -> tuple[range, ...]:
    """The ``count`` terms from ``first`` in the groups that one accumulation step adds at once.

    Groups are counted from the first term of the leaf, shard or tile; the last one may be short and is filled with +0.
    """
    return _pieces(count, group, first)


def fold_pairs(parts: Sequence[T], add: Callable[[T, T], T]) -> T:
    """Balanced tree of adjacent pairs, ((p0+p1)+(p2+p3))+((p4+p5)+(p6+p7)) for eight; joins shards and leaves.

    The parts of a rank (``rlk.contract.topology.owned``) are a whole subtree: folding each rank's parts and then the ranks' results gives
    the same additions. Raises ContractError unless the number of parts is a power of two.
    """
    if not is_power_of_two(len(parts)):
        raise ContractError(f"{len(parts)} parts are not a power of two: give one per canonical shard or leaf, +0 where a rank has none")
    level = list(parts)
    while len(level) > 1:
        level = [add(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def fold_halves(values: Sequence[T], add: Callable[[T, T], T], zero: T) -> T:
    """Row tree, for sums inside a row or tile: fill with ``zero`` (+0) to a power of two, add the upper half to the lower, repeat."""
    level = list(values)
    while not is_power_of_two(len(level)):
        level.append(zero)
    while len(level) > 1:
        half = len(level) // 2
        level = [add(level[i], level[i + half]) for i in range(half)]
    return level[0]


def attention_tiles(visible: int, numerics: Numerics = DEFAULT) -> tuple[range, ...]:
    """Key positions of each tile of a row that sees keys 0 … visible-1; the last tile may be short."""
    return _pieces(visible, numerics.kv_tile)


def attention_splits(visible: int, numerics: Numerics = DEFAULT) -> tuple[range, ...]:
    """Key positions of each split of a row that sees keys 0 … visible-1: the online-softmax state restarts at the start of each.

    Edges are logical key positions, multiples of kv_split; prompt length, chunk, page and batch do not move them.
    kv_split = 0 is one split.
    """
    return _pieces(visible, numerics.kv_split or max(visible, 1))


def _pieces(count: int, size: int, first: int = 0) -> tuple[range, ...]:
    return tuple(range(at, min(at + size, first + count)) for at in range(first, first + count, size))
