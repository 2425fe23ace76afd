"""qk_norm: equal to rms_norm per head, gamma gradient per shard of heads, invariance, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlk.contract.judgments import FORWARD_ACCURACY, GRADIENT_ACCURACY
from rlk.contract.orders import fold_halves, fold_pairs
from rlk.contract.topology import owned, token_leaves
from rlk.contract.workloads import WS1
from rlk.kernels.dispatch import BackendUnavailable, readback, reset_readback
from rlk.kernels.qk_norm import qk_norm, qk_norm_gamma_grad, qk_norm_shard_gamma_grads, reference
from rlk.kernels.rms_norm import rms_norm

Check = Callable[..., None]
EPS, HEADS, DIM, SHARDS = 1e-6, 16, 32, 8
LEAVES = token_leaves(WS1.lengths)
INDEX, OFFSETS = torch.tensor(LEAVES.index), torch.tensor(LEAVES.offsets)


def _inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(9)
    make = lambda *shape: torch.randn(*shape, generator=generator).bfloat16()
    return make(WS1.packed, HEADS, DIM), make(DIM), make(WS1.packed, HEADS, DIM)


def _both_ways(x: torch.Tensor, gamma: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = qk_norm(leaf, gamma, EPS)
    y.backward(dy)
    assert leaf.grad is not None
    return y.detach(), leaf.grad


def _gamma_grad(x: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    return qk_norm_gamma_grad(x, dy, EPS, index, offsets, SHARDS)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    view = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(view), b.contiguous().view(view))


def test_every_head_is_an_rms_norm() -> None:
    x, gamma, dy = _inputs()
    y, dx = _both_ways(x, gamma, dy)
    row = x.reshape(-1, DIM).requires_grad_()
    expected = rms_norm(row, gamma, EPS)
    expected.backward(dy.reshape(-1, DIM))
    assert row.grad is not None
    assert _same(y, expected.detach().reshape_as(y))
    assert _same(dx, row.grad.reshape_as(dx))


def test_forward_is_accurate(assert_accurate: Check) -> None:
    x, gamma, _ = _inputs()
    assert_accurate("qk_norm", FORWARD_ACCURACY, qk_norm(x, gamma, EPS), reference.qk_norm(x, gamma, EPS))


def test_gradients_are_accurate(assert_accurate: Check) -> None:
    x, gamma, dy = _inputs()
    x32, gamma32 = x.float().requires_grad_(), gamma.float().requires_grad_()
    reference.qk_norm(x32, gamma32, EPS).backward(dy.float())
    assert x32.grad is not None
    assert gamma32.grad is not None
    assert_accurate("qk_norm", GRADIENT_ACCURACY, _both_ways(x, gamma, dy)[1], x32.grad)
    assert_accurate("qk_norm", GRADIENT_ACCURACY, _gamma_grad(x, dy, INDEX, OFFSETS), gamma32.grad)


def test_rows_and_their_gradients_are_invariant(assert_rows_invariant: Check) -> None:
    x, gamma, dy = _inputs()
    assert_rows_invariant(lambda x, dy: _both_ways(x, gamma, dy), x, dy)


def test_gamma_gradient_is_invariant_to_layout(assert_leaves_invariant: Check) -> None:
    x, _, dy = _inputs()
    roots = lambda x, dy, index, offsets: qk_norm_shard_gamma_grads(x, dy, EPS, index, offsets, SHARDS)
    assert_leaves_invariant(roots, x, dy)


def _terms(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """dy·bf16(x̂) of every token and head in leaf order, +0 where the leaf is filled: [n, HEADS, DIM]."""
    x_hat = qk_norm(x, torch.ones(DIM).bfloat16(), EPS).float()
    return torch.cat((dy.float() * x_hat, torch.zeros(1, HEADS, DIM)))[INDEX]


def _leaf_sum(terms: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(DIM)
    for at in range(0, len(terms), 16):
        total = total + fold_halves(list(terms[at : at + 16]), torch.add, torch.zeros(()))
    return total


def _written_order(terms: torch.Tensor, heads_first: bool) -> torch.Tensor:
    shards = []
    for s in range(SHARDS):
        own = owned(SHARDS, s, HEADS)
        leaves = []
        for first, last in zip(LEAVES.offsets, LEAVES.offsets[1:]):
            block = terms[first:last, own.start : own.stop]
            leaves.append(_leaf_sum((block.transpose(0, 1) if heads_first else block).reshape(-1, DIM)))
        shards.append(fold_pairs(leaves, torch.add))
    return fold_pairs(shards, torch.add)


def test_gamma_gradient_adds_tokens_then_heads_then_leaves_then_shards() -> None:
    x, _, dy = _inputs()
    result = _gamma_grad(x, dy, INDEX, OFFSETS)
    assert _same(result, _written_order(_terms(x, dy), heads_first=False))
    assert not _same(result, _written_order(_terms(x, dy), heads_first=True))


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("cp", [1, 4, 8])
def test_gamma_gradient_is_invariant_to_tp_and_cp(tp: int, cp: int) -> None:
    """Each rank sends one partial per shard; leaves are joined over CP first, then shards over TP."""
    x, _, dy = _inputs()
    shards: list[torch.Tensor] = []
    for rank in range(tp):
        heads, own = owned(tp, rank, HEADS), []
        for leaf_rank in range(cp):
            leaves = owned(cp, leaf_rank, len(LEAVES.offsets) - 1)
            first, last = LEAVES.offsets[leaves.start], LEAVES.offsets[leaves.stop]
            piece = slice(heads.start, heads.stop)
            offsets = OFFSETS[leaves.start : leaves.stop + 1] - first
            own.append(qk_norm_shard_gamma_grads(x[:, piece], dy[:, piece], EPS, INDEX[first:last], offsets, SHARDS // tp))
        shards.extend(fold_pairs(own, torch.add).unbind())
    assert _same(fold_pairs(shards, torch.add), _gamma_grad(x, dy, INDEX, OFFSETS))


def test_joining_shards_before_leaves_gives_other_bytes() -> None:
    x, _, dy = _inputs()
    halves = []
    for leaves in (range(4), range(4, 8)):
        first, last = LEAVES.offsets[leaves.start], LEAVES.offsets[leaves.stop]
        halves.append(_gamma_grad(x, dy, INDEX[first:last], OFFSETS[leaves.start : leaves.stop + 1] - first))
    assert not _same(fold_pairs(halves, torch.add), _gamma_grad(x, dy, INDEX, OFFSETS))


def test_one_shard_gives_other_bytes_than_eight() -> None:
    x, _, dy = _inputs()
    assert not _same(qk_norm_gamma_grad(x, dy, EPS, INDEX, OFFSETS, 1), _gamma_grad(x, dy, INDEX, OFFSETS))


def test_wrong_arguments_are_refused() -> None:
    x, gamma, dy = _inputs()
    for arguments in ((x.float(), gamma), (x, gamma.float()), (x, gamma[1:]), (x[0], gamma)):
        with pytest.raises(ValueError, match="qk_norm: "):
            qk_norm(*arguments, EPS)
    for shards in (0, 3, 32):
        with pytest.raises(ValueError, match=f"shards={shards} must be a power of two that divides 16 heads"):
            qk_norm_gamma_grad(x, dy, EPS, INDEX, OFFSETS, shards)
    for arguments in ((x.float(), dy), (x, dy[1:]), (x[:10], dy[:10]), (x[:, 0], dy[:, 0])):
        with pytest.raises(ValueError, match="qk_norm_gamma_grad: "):
            qk_norm_gamma_grad(*arguments, EPS, INDEX, OFFSETS, SHARDS)
    with pytest.raises(BackendUnavailable):
        qk_norm(x, gamma, EPS, backend="triton")


def test_what_ran_is_read_back() -> None:
    x, gamma, dy = _inputs()
    reset_readback()
    _both_ways(x, gamma, dy)
    _gamma_grad(x, dy, INDEX, OFFSETS)
    assert [(ran.op, ran.backend, ran.calls) for ran in readback()] == [
        ("qk_norm", "cpu", 1),
        ("qk_norm.backward", "cpu", 1),
        ("qk_norm.gamma_grad", "cpu", 1),
    ]


def test_operator_is_well_registered() -> None:
    x, gamma, _ = _inputs()
    torch.library.opcheck(torch.ops.rlk.qk_norm, (x.requires_grad_(), gamma, EPS))
