"""Micro-batches: what is packed, in which order, and which rows carry loss."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from rlk.contract.numerics import DEFAULT, ContractError, Numerics
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.contract.topology import token_leaves
from rlk.kernels.det_gemm import det_gemm_weight_grad
from rlk.train.batch import Sample, micro_batch, micro_batches


def sample(sample_id: int, prompt: int, answer: int, **sampling: float) -> Sample:
    ids, tokens = tuple(range(10, 10 + prompt)), tuple(range(50, 50 + answer))
    params = SamplingParams(**sampling)
    support = tuple((token, 99) for token in tokens) if params.truncates else None
    response = Response(sample_id, ids, tokens, (0.0,) * answer, support, "length", 0, 0)
    return Sample(Request(sample_id, ids, params), response)


def test_packed_tensors_by_hand() -> None:
    batch = micro_batch([sample(2, 3, 2, temperature=0.7), sample(5, 1, 1, temperature=0.0), sample(6, 2, 1, top_k=2)], DEFAULT)
    assert batch.ids.tolist() == [10, 11, 12, 50, 51, 10, 50, 10, 11, 50]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 5, 7, 10]
    assert batch.rows.tolist() == [2, 3, 5, 8]
    assert batch.targets.tolist() == [50, 51, 50, 50]
    assert torch.equal(batch.temperature, torch.tensor([0.7, 0.7, 1.0, 1.0]))
    assert batch.supports == (None, None, None, (50, 99))
    assert (batch.tokens, batch.per_sample([1.0, 2.0, 3.0, 4.0])) == (10, [[1.0, 2.0], [3.0], [4.0]])


@pytest.mark.parametrize("numerics", [DEFAULT, Numerics(canonical_cp=2)])
def test_leaves_are_the_contracts(numerics: Numerics) -> None:
    batch = micro_batch([sample(0, 30, 11), sample(1, 5, 90)], numerics)
    leaves = token_leaves([41, 95], numerics.canonical_cp)
    assert (tuple(batch.leaf_index.tolist()), tuple(batch.leaf_offsets.tolist())) == (leaves.index, leaves.offsets)
    assert len(leaves.offsets) == numerics.canonical_cp + 1


def test_leaves_of_scored_rows_are_those_of_all_without_groups_that_hold_none() -> None:
    batch = micro_batch([sample(0, 300, 3), sample(1, 5, 90), sample(2, 40, 40)], DEFAULT)
    assert torch.equal(batch.scored, batch.rows)
    groups = [[row if row in batch.rows else -1 for row in group] for group in batch.leaf_index.view(-1, DEFAULT.mma_k).tolist()]
    packed = torch.cat([batch.scored, torch.tensor([-1])])[batch.scored_index]
    assert packed.view(-1, DEFAULT.mma_k).tolist() == [group for group in groups if max(group) >= 0]
    edges = batch.scored_offsets.tolist()
    for leaf, (first, last) in enumerate(pairwise(edges)):
        whole = batch.leaf_index[batch.leaf_offsets[leaf] : batch.leaf_offsets[leaf + 1]].tolist()
        assert [row for row in packed[first:last].tolist() if row >= 0] == [row for row in whole if row in batch.rows]
    assert edges[-1] < batch.leaf_index.numel()


def test_a_gradient_over_scored_rows_is_that_over_all_rows() -> None:
    batch = micro_batch([sample(0, 100, 3), sample(1, 5, 90), sample(2, 1, 1)], DEFAULT)
    generator = torch.Generator().manual_seed(0)
    x, dy = torch.randn(batch.tokens, 24, generator=generator).bfloat16(), torch.zeros(batch.tokens, 40, dtype=torch.bfloat16)
    dy[batch.rows] = torch.randn(len(batch.rows), 40, generator=generator).bfloat16()
    dy[batch.rows[::3]] = -0.0
    whole = det_gemm_weight_grad(x, dy, batch.leaf_index, batch.leaf_offsets)
    few = lambda dy: det_gemm_weight_grad(x[batch.scored], dy, batch.scored_index, batch.scored_offsets)
    assert torch.equal(few(dy[batch.scored]).view(torch.int32), whole.view(torch.int32))
    assert not torch.equal(few(dy[batch.scored].roll(1, 0)), whole)


def test_micro_batches_hold_contiguous_ids_and_leave_empty_samples_out() -> None:
    samples = [sample(i, 2, 0 if i in (1, 4, 5) else 2) for i in (5, 3, 1, 0, 4, 2)]
    held = [[s.sample_id for s in batch.samples] for batch in micro_batches(samples, 2, DEFAULT)]
    assert held == [[0], [2, 3]]
    assert [len(batch.samples) for batch in micro_batches(samples, 8, DEFAULT)] == [3]


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(ContractError, match="micro_batch_size=0"):
        list(micro_batches([sample(0, 1, 1)], 0, DEFAULT))


def test_support_and_request_must_agree() -> None:
    kept, plain = sample(0, 2, 2, top_k=2), sample(0, 2, 2)
    with pytest.raises(ContractError, match="no retained ids"):
        Sample(kept.request, plain.response)
    with pytest.raises(ContractError, match="does not truncate"):
        Sample(plain.request, kept.response)
    with pytest.raises(ContractError, match="different ids or prompts"):
        Sample(plain.request, replace(plain.response, prompt_ids=(1, 2)))
