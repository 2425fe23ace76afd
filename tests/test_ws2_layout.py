"""Micro-batches of context parallel ranks: every token once, in the leaves of the whole, with padding that takes part in nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlk.contract.numerics import DEFAULT, ContractError
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.contract.topology import padded_length, token_leaves
from rlk.parallel.collectives import ALONE
from rlk.train import process
from rlk.train.batch import MicroBatch, Sample, micro_batch
from rlk.train.megatron import megatron_settings
from rlk.train.readback import gradient_scales, parallel
from rlk.train.scoring import Scoring

lengths = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=4)


def sample(i: int, prompt: int, answer: int) -> Sample:
    ids = tuple((i + 7 * p) % 250 for p in range(prompt + answer))
    request = Request(i, ids[:prompt], SamplingParams())
    return Sample(request, Response(i, ids[:prompt], ids[prompt:], (0.0,) * answer, None, "length", 0, 0))


def place(batch: MicroBatch, rows: list[int]) -> list[tuple[int, int]]:
    """(sample, position) of rows."""
    return [(int((batch.cu_seqlens[1:] <= row).sum()), int(batch.positions[row])) for row in rows]


@given(lengths, st.sampled_from([2, 4, 8]))
def test_ranks_hold_every_token_and_target_once(shapes: list[tuple[int, int]], cp: int) -> None:
    held = [sample(i, *shape) for i, shape in enumerate(shapes)]
    whole = micro_batch(held, DEFAULT)
    ranks = [micro_batch(held, DEFAULT, cp, rank) for rank in range(cp)]
    sizes = {batch.tokens for batch in ranks}
    assert sizes == {sum(padded_length(sum(shape)) for shape in shapes) // cp}
    # Real rows, put back in order, are the whole batch.
    for name in ("ids", "positions"):
        joined = torch.stack([getattr(batch, name) for batch in ranks])
        for batch in ranks:
            assert torch.equal(batch.context.whole(joined), getattr(whole, name))
    # Targets.
    assert sorted(chain.from_iterable(batch.own.tolist() for batch in ranks)) == list(range(len(whole.targets)))
    for batch in ranks:
        assert torch.equal(batch.targets, whole.targets[batch.own])
        assert place(batch, batch.rows.tolist()) == place(whole, whole.rows[batch.own].tolist())
        assert torch.equal(batch.joined % batch.tokens, torch.cat([b.rows for b in ranks])[torch.cat([b.own for b in ranks]).argsort()])


@given(lengths, st.sampled_from([2, 4, 8]))
def test_leaves_of_the_ranks_are_the_leaves_of_the_whole(shapes: list[tuple[int, int]], cp: int) -> None:
    held = [sample(i, *shape) for i, shape in enumerate(shapes)]
    whole = micro_batch(held, DEFAULT)
    expected = [None if row < 0 else place(whole, [row])[0] for row in token_leaves([sum(shape) for shape in shapes]).index]
    found: list[tuple[int, int] | None] = []
    for rank in range(cp):
        batch = micro_batch(held, DEFAULT, cp, rank)
        found += [None if row < 0 else place(batch, [row])[0] for row in batch.leaf_index.tolist()]
        assert len(batch.leaf_offsets) == 8 // cp + 1
    assert found == expected


@given(lengths, st.sampled_from([2, 4, 8]))
def test_segments_cover_the_real_rows_of_a_rank(shapes: list[tuple[int, int]], cp: int) -> None:
    held = [sample(i, *shape) for i, shape in enumerate(shapes)]
    starts = [sum(sum(s) for s in shapes[:i]) for i in range(len(shapes))]
    for rank in range(cp):
        batch = micro_batch(held, DEFAULT, cp, rank)
        at = place(batch, batch.context.real.tolist())
        covered = [(starts.index(s.gathered), p) for s in batch.context.segments for p in range(s.position, s.position + s.rows)]
        assert covered == at
        # A rank holds at most two runs of a sample: its two chunks.
        assert all(sum(s.gathered == start for s in batch.context.segments) <= 2 for start in starts)
        values = torch.arange(1.0, len(at) + 1)
        scattered = batch.context.scatter(values, batch.tokens)
        assert torch.equal(scattered[batch.context.real], values)
        assert int((scattered != 0).sum()) == len(at)


def test_a_rank_without_a_token_has_rows_but_no_leaf_target_or_segment() -> None:
    batch = micro_batch([sample(0, 1, 1)], DEFAULT, 8, 5)
    assert batch.tokens == 2
    assert (batch.leaf_index.numel(), batch.rows.numel(), batch.context.segments) == (0, 0, ())
    assert batch.leaf_offsets.tolist() == [0, 0]
    assert (batch.scored.tolist(), batch.scored_index.numel(), batch.scored_offsets.tolist()) == ([0], 0, [0, 0])
    assert batch.joined.tolist() == [0]


def test_only_rows_that_are_scored_can_be_named() -> None:
    scoring = Scoring(24, 24, DEFAULT, SimpleNamespace(tp=ALONE, shards=range(8)))  # type: ignore[arg-type]
    for rank, scored, named in ((0, 0, -1), (1, 5, 11)):
        batch = micro_batch([sample(0, 20, 5)], DEFAULT, 2, rank)
        batch = replace(batch, targets=batch.targets % 24)
        assert (len(batch.rows), len(batch.scored)) == (scored, max(scored, 1))
        _, bad = scoring.rows(batch, torch.full((len(batch.scored), 24), torch.inf))
        assert bad.tolist() == [named]


def test_the_transport_that_is_read_back_is_the_one_in_use() -> None:
    process.stop()  # a test of another file may have joined a job of one in this process
    try:
        assert parallel(process.start(transport="shm"))["transport"] == "shm"
    finally:
        process.stop()


@pytest.mark.parametrize("hook", ["finalize_model_grads_func", "grad_sync_func", "no_sync_func", "param_sync_func"])
def test_megatrons_gradient_hooks_must_be_off(hook: str) -> None:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from rlk.loop.prepare import tiny_config

    config = TransformerConfig(**megatron_settings(tiny_config()))
    assert set(gradient_scales(config).values()) == {1.0}
    setattr(config, hook, lambda *_: None)
    with pytest.raises(ContractError, match=f"Megatron's {hook} is set"):
        gradient_scales(config)
    setattr(config, hook, None)
    config.grad_scale_func = lambda loss: loss * 0.5
    with pytest.raises(ContractError, match=r"grad_scale_func=0\.5"):
        gradient_scales(config)
