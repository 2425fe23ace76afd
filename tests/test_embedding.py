"""embedding: exact rows, ids checked before the launch, weight gradient in leaf order, invariance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlk.contract.judgments import FORWARD_ACCURACY, GRADIENT_ACCURACY
from rlk.contract.orders import fold_pairs
from rlk.contract.topology import owned, token_leaves
from rlk.contract.workloads import WS1
from rlk.kernels.dispatch import BackendUnavailable, readback, reset_readback
from rlk.kernels.embedding import embedding, embedding_weight_grad, reference
from rlk.kernels.pack import pack

Check = Callable[..., None]
VOCAB, ROWS, WIDTH = 12, 16, 24
LEAVES = token_leaves(WS1.lengths)
INDEX, OFFSETS = torch.tensor(LEAVES.index), torch.tensor(LEAVES.offsets)


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids with many repeats (id 5 absent), weight with signed zeros, dy over a wide range of magnitudes."""
    generator = torch.Generator().manual_seed(23)
    weight = torch.randn(ROWS, WIDTH, generator=generator).bfloat16()
    weight[:, ::5], weight[:, 1::5] = -0.0, 0.0
    ids = torch.randint(VOCAB - 1, (WS1.packed,), generator=generator)
    dy = torch.randn(WS1.packed, WIDTH, generator=generator) * 64 ** torch.randn(WS1.packed, WIDTH, generator=generator)
    return ids + (ids >= 5), weight, dy.bfloat16()


def _grad(ids: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return embedding_weight_grad(ids, dy, index, offsets, ROWS)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    view = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(view), b.contiguous().view(view))


def test_rows_are_copied_with_the_sign_of_zero() -> None:
    ids, weight, _ = _inputs()
    assert _same(embedding(ids, weight, VOCAB), weight[ids])


def test_a_masked_sum_over_shards_loses_the_sign_of_zero() -> None:
    ids, weight, _ = _inputs()
    total = torch.zeros(WS1.packed, WIDTH).bfloat16()
    for rank in range(2):
        own = owned(2, rank, ROWS)
        mine = (ids >= own.start) & (ids < own.stop)
        total = total + torch.where(mine[:, None], weight[ids], torch.zeros(()).bfloat16())
    assert torch.equal(total, embedding(ids, weight, VOCAB))
    assert not _same(total, embedding(ids, weight, VOCAB))


def test_forward_and_gradient_are_accurate(assert_accurate: Check) -> None:
    ids, weight, dy = _inputs()
    leaf = weight.float().requires_grad_()
    reference.embedding(ids, leaf).backward(dy.float())
    assert leaf.grad is not None
    assert_accurate("embedding", FORWARD_ACCURACY, embedding(ids, weight, VOCAB), reference.embedding(ids, weight))
    assert_accurate("embedding", GRADIENT_ACCURACY, _grad(ids, dy, INDEX, OFFSETS), leaf.grad)


def _written_order(ids: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(ROWS, WIDTH)
    for v in range(ROWS):
        leaves = []
        for first, last in zip(LEAVES.offsets, LEAVES.offsets[1:]):
            total = torch.zeros(WIDTH)
            for token in LEAVES.index[first:last]:
                if token >= 0 and int(ids[token]) == v:
                    total = total + dy[token].float()
            leaves.append(total)
        out[v] = fold_pairs(leaves, torch.add)
    return out


def test_weight_gradient_adds_per_id_in_leaf_order() -> None:
    ids, _, dy = _inputs()
    result = _grad(ids, dy, INDEX, OFFSETS)
    assert _same(result, _written_order(ids, dy))
    token_by_token = torch.zeros(ROWS, WIDTH)
    for t in range(WS1.packed):
        token_by_token[ids[t]] += dy[t].float()
    assert not _same(result, token_by_token)


def test_rows_without_a_token_are_positive_zero() -> None:
    ids, _, dy = _inputs()
    result = _grad(ids, dy, INDEX, OFFSETS)
    untouched = result[[5, *range(VOCAB, ROWS)]]
    assert int(untouched.view(torch.int32).abs().max()) == 0
    assert _same(_grad(ids, torch.full_like(dy, -0.0), INDEX, OFFSETS), torch.zeros(ROWS, WIDTH))


def test_rows_are_invariant(assert_rows_invariant: Check) -> None:
    ids, weight, _ = _inputs()
    assert_rows_invariant(lambda ids: embedding(ids, weight, VOCAB), ids)


def test_weight_gradient_is_invariant(assert_leaves_invariant: Check) -> None:
    ids, _, dy = _inputs()
    assert_leaves_invariant(_grad, ids, dy)


@pytest.mark.parametrize("tp", [2, 4])
def test_vocabulary_shards_hold_slices_of_the_whole_gradient(tp: int) -> None:
    ids, _, dy = _inputs()
    whole, parts = _grad(ids, dy, INDEX, OFFSETS), []
    for rank in range(tp):
        own = owned(tp, rank, ROWS)
        mine = (ids >= own.start) & (ids < own.stop)
        index = torch.where((INDEX >= 0) & mine[INDEX], INDEX, -1)
        parts.append(embedding_weight_grad(ids - own.start, dy, index, OFFSETS, len(own)))
    assert _same(torch.cat(parts), whole)


def test_a_large_vocabulary_needs_no_copy_per_leaf() -> None:
    ids = torch.tensor([151935, 0, 151935])
    dy = torch.ones(3, 2).bfloat16()
    leaves = token_leaves([3])
    grad = embedding_weight_grad(ids, dy, torch.tensor(leaves.index), torch.tensor(leaves.offsets), 152576)
    assert grad[[0, 151935]].tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert int(grad.count_nonzero()) == 4


@pytest.mark.parametrize(("position", "bad"), [(1, -1), (2, VOCAB), (2, VOCAB + 7), (0, 2**40)])
def test_id_outside_the_vocabulary_raises_before_anything_runs(position: int, bad: int) -> None:
    _, weight, _ = _inputs()
    ids = torch.tensor([3, 4, 5])
    ids[position] = bad
    reset_readback()
    with pytest.raises(IndexError, match=f"id {bad} at position {position} is outside 0…{VOCAB - 1}"):
        embedding(ids, weight, VOCAB)
    with pytest.raises(IndexError, match=f"id {bad} at position {position} is outside"):
        embedding_weight_grad(ids, torch.ones(3, WIDTH).bfloat16(), torch.tensor([0, 1, 2]), torch.tensor([0, 3]), VOCAB)
    assert readback() == []


def test_bad_ids_at_masked_positions_never_reach_the_lookup() -> None:
    _, weight, dy = _inputs()
    ids, mask = torch.tensor([[3, -1, VOCAB + 7]]), torch.tensor([[True, False, False]])
    assert _same(embedding(pack(ids, mask), weight, VOCAB), weight[3:4])
    with pytest.raises(IndexError, match="id -1 at position 1"):
        embedding(ids[0], weight, VOCAB)
    named = embedding_weight_grad(ids[0], dy[:3], torch.tensor([0, -1, -1, -1]), torch.tensor([0, 4]), ROWS)
    assert _same(named[3], dy[0].float())


def test_wrong_arguments_are_refused() -> None:
    ids, weight, dy = _inputs()
    for arguments in ((ids.int(), weight, VOCAB), (ids[None], weight, VOCAB), (ids, weight.float(), VOCAB), (ids, weight, ROWS + 1)):
        with pytest.raises(ValueError, match="embedding: "):
            embedding(*arguments)
    for named, rows in ((ids.int(), dy), (ids, dy.float()), (ids, dy[1:]), (ids[:10], dy[:10])):
        with pytest.raises(ValueError, match="embedding_weight_grad: "):
            embedding_weight_grad(named, rows, INDEX, OFFSETS, ROWS)
    with pytest.raises(BackendUnavailable):
        embedding(ids, weight, VOCAB, backend="triton")


def test_what_ran_is_read_back() -> None:
    ids, weight, dy = _inputs()
    reset_readback()
    embedding(ids, weight, VOCAB)
    _grad(ids, dy, INDEX, OFFSETS)
    assert [(ran.op, ran.backend, ran.calls) for ran in readback()] == [("embedding", "cpu", 1), ("embedding.weight_grad", "cpu", 1)]


def test_operator_is_well_registered() -> None:
    ids, weight, _ = _inputs()
    torch.library.opcheck(torch.ops.rlk.embedding, (ids, weight, VOCAB))
