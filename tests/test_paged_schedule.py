"""Scheduler and cache of the paged engine by themselves: who computes what, who keeps what, and the way back to logical order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlk.contract.records import Request
from rlk.contract.sampling import SamplingParams
from rlk.contract.topology import interleaved_positions, restore_order
from rlk.model.config import Qwen3Config
from rlk.parallel.collectives import ALONE
from rlk.rollout.paged.cache import PagedCache, in_logical_order
from rlk.rollout.paged.schedule import Running, Scheduler

CONFIG = Qwen3Config(
    vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=16, num_key_value_heads=8,
    head_dim=16, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=96,
)  # fmt: skip


def running(sample: int, prompt: int, limit: int) -> Running:
    return Running(Request(sample, (1,) * prompt, SamplingParams()), limit, [1] * prompt)


def course(prompts: list[int], tokens: int, sequences: int, pages: int) -> tuple[list[list[tuple[int, int, int]]], PagedCache]:
    """Pieces (sample, start, stop) of every step when each sequence gets two tokens."""
    cache = PagedCache(CONFIG, pages, 4, ALONE, ALONE)
    scheduler = Scheduler(cache, tokens, sequences)
    scheduler.add([running(i, n, n + 2) for i, n in enumerate(prompts)])
    steps = []
    while pieces := scheduler.step():
        steps.append([(p.running.request.sample_id, p.start, p.stop) for p in pieces])
        for piece in pieces:
            if piece.last:
                piece.running.ids.append(1)
                if len(piece.running.ids) == piece.running.limit:
                    scheduler.finish(piece.running)
    return steps, cache


def test_long_prompts_come_in_chunks_between_others() -> None:
    steps, _ = course([5, 2, 9], tokens=6, sequences=8, pages=16)
    assert steps == [[(0, 0, 5), (1, 0, 1)], [(0, 5, 6), (1, 1, 2), (2, 0, 4)], [(1, 2, 3), (2, 4, 9)], [(2, 9, 10)]]


def test_a_sequence_waits_for_room() -> None:
    assert course([5, 2, 9], tokens=64, sequences=1, pages=16)[0][:3] == [[(0, 0, 5)], [(0, 5, 6)], [(1, 0, 2)]]
    assert course([5, 2, 9], tokens=64, sequences=8, pages=3)[0][0] == [(0, 0, 5), (1, 0, 2)]


@given(
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=8), tokens=st.integers(1, 20), sequences=st.integers(1, 5),
    pages=st.integers(4, 12),
)  # fmt: skip
def test_every_token_is_computed_once(prompts: list[int], tokens: int, sequences: int, pages: int) -> None:
    steps, cache = course(prompts, tokens, sequences, pages)
    for step in steps:
        assert 0 < sum(stop - start for _, start, stop in step) <= tokens
        assert len(step) <= sequences
    for sample, prompt in enumerate(prompts):
        covered = [p for step in steps for s, start, stop in step if s == sample for p in range(start, stop)]
        assert covered == list(range(prompt + 1))
    assert sorted(cache.free) == list(range(pages))


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_pages_of_the_ranks_side_by_side_are_in_logical_order(cp: int) -> None:
    page, heads, length = 3, 2, 41
    held = [interleaved_positions(length, cp, rank) for rank in range(cp)]
    pages = -(-length // (page * cp))
    caches = torch.full((cp, pages, heads, page, 4), -1)
    for rank, positions in enumerate(held):
        for at, p in enumerate(positions):
            caches[rank, at // page, :, at % page] = p
    logical = in_logical_order(caches).transpose(1, 2).flatten(0, 1)[:length]
    assert (logical == torch.arange(length)[:, None, None]).all()
    rows = torch.cat([caches[rank].transpose(1, 2).flatten(0, 1)[: len(p)] for rank, p in enumerate(held)])
    assert torch.equal(rows[list(restore_order(held, length))], logical)


def test_six_tokens_on_two_ranks() -> None:
    assert [interleaved_positions(6, 2, rank) for rank in range(2)] == [(0, 2, 4), (1, 3, 5)]


def test_slots_follow_the_block_table() -> None:
    cache = PagedCache(CONFIG, 8, 4, ALONE, ALONE)
    assert cache.slots([5, 2], [0, 3, 4, 7]) == [20, 23, 8, 11]
    k, v = torch.rand(4, 8, 16).bfloat16(), torch.rand(4, 8, 16).bfloat16()
    cache.write(0, torch.tensor(cache.slots([5, 2], [0, 3, 4, 7])), k, v)
    kept = cache.layers[0, [5, 2]].transpose(1, 2).flatten(0, 1)
    assert torch.equal(kept[[0, 3, 4, 7]], torch.cat([k, v], dim=2))
    assert kept[[1, 2, 5, 6]].isnan().all()
    assert cache.layers[0, [0, 1, 3, 4, 6, 7]].isnan().all()
