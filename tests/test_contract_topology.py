"""Ownership, leaves and chunks: the laws that let any TP and CP compute the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlk.contract.numerics import ContractError, Numerics
from rlk.contract.orders import fold_pairs
from rlk.contract.topology import (
    TokenLeaves,
    Topology,
    block_size,
    interleaved_positions,
    leaf_positions,
    local_token_leaves,
    owned,
    padded_length,
    restore_order,
    token_leaves,
    zigzag_positions,
)
from rlk.contract.workloads import WS1

degrees = st.sampled_from([1, 2, 4, 8])
lengths = st.lists(st.integers(1, 90), min_size=1, max_size=5)


def _leaf(leaves: TokenLeaves, r: int) -> tuple[int, ...]:
    return leaves.index[leaves.offsets[r] : leaves.offsets[r + 1]]


@given(degrees)
def test_owned_shards_are_a_partition_into_adjacent_runs(ranks: int) -> None:
    assert [s for rank in range(ranks) for s in owned(ranks, rank)] == list(range(8))


@given(degrees)
def test_owned_shards_are_a_subtree(ranks: int) -> None:
    """Folding each rank's shards and then the ranks' results spells the same tree as folding all shards."""
    join = lambda a, b: f"({a}+{b})"
    per_rank = [fold_pairs([f"p{s}" for s in owned(ranks, rank)], join) for rank in range(ranks)]
    assert fold_pairs(per_rank, join) == fold_pairs([f"p{s}" for s in range(8)], join)


def test_strided_shards_are_no_subtree() -> None:
    join = lambda a, b: f"({a}+{b})"
    per_rank = [fold_pairs([f"p{s}" for s in (rank, rank + 4)], join) for rank in range(4)]
    assert fold_pairs(per_rank, join) != fold_pairs([f"p{s}" for s in range(8)], join)


@given(lengths)
def test_leaves_hold_every_token_once(lengths: list[int]) -> None:
    assert sorted(row for row in token_leaves(lengths).index if row >= 0) == list(range(sum(lengths)))


@given(lengths)
def test_offsets_are_whole_groups_and_every_sample_starts_one(lengths: list[int]) -> None:
    leaves = token_leaves(lengths)
    assert all(offset % 16 == 0 for offset in leaves.offsets)
    assert len(leaves.offsets) == 9
    assert leaves.offsets[-1] == len(leaves.index)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for at in range(0, len(leaves.index), 16):
        group = [row for row in leaves.index[at : at + 16] if row >= 0]
        owners = {max(i for i, start in enumerate(starts) if start <= row) for row in group}
        assert len(owners) == 1, "a group holds tokens of one sample and is never fill alone"
        assert list(leaves.index[at : at + len(group)]) == group, "fill stands behind the tokens"


@given(st.integers(1, 400), degrees)
def test_cp_ranks_differ_by_at_most_15_tokens_a_sample(length: int, cp: int) -> None:
    held = [sum(len(leaf_positions(length, r)) for r in owned(cp, rank)) for rank in range(cp)]
    assert sum(held) == length
    assert max(held) - min(held) <= 15


@given(st.integers(1, 200), degrees)
def test_zigzag_chunks_hold_exactly_the_rank_s_leaves(length: int, cp: int) -> None:
    """Megatron's chunks rank and 2·cp-1-rank of the padded sequence are the leaves the rank owns: nothing is sliced again."""
    chunk = padded_length(length) // (2 * cp)
    for rank in range(cp):
        megatron = [p for c in (rank, 2 * cp - 1 - rank) for p in range(c * chunk, (c + 1) * chunk)]
        assert list(zigzag_positions(length, cp, rank)) == megatron
        assert sorted(p for p in megatron if p < length) == sorted(p for r in owned(cp, rank) for p in leaf_positions(length, r))


def test_the_least_padding_moves_tokens_between_ranks() -> None:
    """The control of the law above: 20 tokens are a multiple of 2·cp too, but chunks of 5 are not the leaves of 19 tokens."""
    chunks = [list(range(at, at + 5)) for at in (0, 5, 10, 15)]
    held = sorted(p for p in chunks[0] + chunks[3] if p < 19)
    assert held != sorted(p for r in owned(2, 0) for p in leaf_positions(19, r))


@given(lengths, degrees)
def test_local_leaves_are_the_global_leaves_in_the_rank_s_own_rows(lengths: list[int], cp: int) -> None:
    whole = token_leaves(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    for rank in range(cp):
        rows: list[int] = []
        for n, start in zip(lengths, starts):
            rows += [start + p if p < n else -2 for p in zigzag_positions(n, cp, rank)]
        local = local_token_leaves(lengths, cp, rank)
        for at, r in enumerate(owned(cp, rank)):
            assert tuple(rows[row] if row >= 0 else -1 for row in _leaf(local, at)) == _leaf(whole, r)


@given(st.permutations(range(4)), st.booleans())
def test_leaves_follow_samples_into_any_layout(order: list[int], left: bool) -> None:
    """Permuted and padded batches name other rows, never another order of tokens."""
    packed = token_leaves(WS1.lengths)
    token_of = {start + p: (i, p) for i, (n, start) in enumerate(zip(WS1.lengths, WS1.starts)) for p in range(n)}
    permuted_starts = [sum(WS1.lengths[s] for s in order[: order.index(i)]) for i in range(4)]
    for starts in (permuted_starts, WS1.padded_starts(left)):
        layout = token_leaves(WS1.lengths, starts=starts)
        assert layout.offsets == packed.offsets
        row_of = {(i, p): start + p for i, (n, start) in enumerate(zip(WS1.lengths, starts)) for p in range(n)}
        assert layout.index == tuple(row_of[token_of[row]] if row >= 0 else -1 for row in packed.index)


def test_leaves_of_the_operator_workload() -> None:
    leaves = token_leaves(WS1.lengths)
    assert [row for row in _leaf(leaves, 0) if row >= 0] == [0, 11, 26, 27, 40, 41]
    assert [row for row in _leaf(leaves, 6) if row >= 0] == [6, 9, 17, 20, 33, 36, 52, 53, 58]


def test_a_leaf_without_tokens_is_empty() -> None:
    leaves = token_leaves([3])
    assert leaves.offsets == (0, 16, 32, 48, 48, 48, 48, 48, 48)


@given(st.integers(1, 60), degrees)
def test_order_is_restored_from_both_layouts(length: int, cp: int) -> None:
    for cut in (zigzag_positions, interleaved_positions):
        held = [cut(length, cp, rank) for rank in range(cp)]
        joined = [p for rank in held for p in rank]
        assert [joined[row] for row in restore_order(held, length)] == list(range(length))


def test_restoring_names_a_lost_or_doubled_position() -> None:
    for held in ([(0, 1), (3,)], [(0, 1), (1, 2, 3)]):
        with pytest.raises(ContractError, match="do not hold positions 0 … 3 exactly once each: cut the sequence again"):
            restore_order(held, 4)


def test_topology_owns_by_rank() -> None:
    topology = Topology(tp=2, cp=4, rollout_tp=4, rollout_cp=2)
    assert list(topology.train_shards(1)) == [4, 5, 6, 7]
    assert list(topology.rollout_shards(3)) == [6, 7]
    assert list(topology.train_leaves(2)) == [4, 5]
    assert (topology.train_ranks, topology.rollout_ranks) == (8, 8)


@pytest.mark.parametrize("name", ["tp", "cp", "rollout_tp", "rollout_cp"])
@pytest.mark.parametrize("value", [0, -2, 3, 6, 16])
def test_unusable_degrees_are_refused(name: str, value: int) -> None:
    degree: dict[str, Any] = {name: value}
    with pytest.raises(ContractError, match=rf"^{name}={value} does not divide the canonical 8 as a power of two: use one of 1, 2, 4, 8$"):
        Topology(**degree)


def test_degrees_follow_the_canonical_values_of_the_run() -> None:
    with pytest.raises(ContractError, match=r"tp=4 does not divide the canonical 2 as a power of two: use one of 1, 2$"):
        Topology(tp=4, numerics=Numerics(canonical_tp=2))
    assert Topology(cp=4, numerics=Numerics(canonical_tp=2)).cp == 4


def test_other_refusals() -> None:
    with pytest.raises(ContractError, match="rank 2 is outside ranks=2: use 0 … 1"):
        owned(2, 2)
    with pytest.raises(ContractError, match="rank -1 is outside cp=4: use 0 … 3"):
        zigzag_positions(9, 4, -1)
    with pytest.raises(ContractError, match="rollout_cp=3 does not divide"):
        interleaved_positions(9, 3, 0)
    with pytest.raises(ContractError, match="sequence length 0 has no token: drop the sample"):
        block_size(0)
    with pytest.raises(ContractError, match="1 starts for 2 samples: give one first row per sample"):
        token_leaves([3, 4], starts=[0])
