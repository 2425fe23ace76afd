"""lm_head: fp32 logits in plain order, its gradients in split and token order, under its own name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rlk.contract.judgments import FORWARD_ACCURACY, GRADIENT_ACCURACY
from rlk.contract.topology import token_leaves
from rlk.contract.workloads import WS1
from rlk.kernels.det_gemm import det_gemm, det_gemm_weight_grad
from rlk.kernels.dispatch import BackendUnavailable, readback, reset_readback
from rlk.kernels.lm_head import lm_head, lm_head_weight_grad, reference

Check = Callable[..., None]
HIDDEN, VOCAB = 96, 264


def _inputs(rows: int = WS1.packed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """h [rows, HIDDEN], w [VOCAB, HIDDEN] and dlogits [rows, VOCAB], bf16."""
    generator = torch.Generator().manual_seed(23)
    h, w, dlogits = (torch.randn(*shape, generator=generator) for shape in ((rows, HIDDEN), (VOCAB, HIDDEN), (rows, VOCAB)))
    return h.bfloat16(), (w / HIDDEN**0.5).bfloat16(), dlogits.bfloat16()


def _both_ways(h: torch.Tensor, w: torch.Tensor, dlogits: torch.Tensor, grad_splits: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = h.clone().requires_grad_()
    logits = lm_head(leaf, w, grad_splits=grad_splits)
    logits.backward(dlogits.float())
    assert leaf.grad is not None
    return logits.detach(), leaf.grad


def _leaves() -> tuple[torch.Tensor, torch.Tensor]:
    leaves = token_leaves(WS1.lengths)
    return torch.tensor(leaves.index), torch.tensor(leaves.offsets)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def test_logits_are_unrounded_and_in_plain_order() -> None:
    h, w, dlogits = _inputs()
    logits, _ = _both_ways(h, w, dlogits)
    assert logits.dtype == torch.float32
    assert _same(logits, det_gemm(h, w, out_dtype=torch.float32))
    assert _same(logits.bfloat16(), det_gemm(h, w))
    assert not _same(logits, det_gemm(h, w, splits=8, out_dtype=torch.float32))
    assert not _same(logits, logits.bfloat16().float())


@pytest.mark.parametrize("rows", [1, 3, WS1.packed])
def test_input_gradient_joins_the_vocabulary_shards(rows: int) -> None:
    """dh = dlogits·w: a product with wᵀ as the weight, contracted over the vocabulary in grad_splits leaves."""
    h, w, dlogits = _inputs(rows)
    for grad_splits in (1, 2, 8):
        _, dh = _both_ways(h, w, dlogits, grad_splits)
        assert _same(dh, det_gemm(dlogits, w.T, splits=grad_splits))


def test_another_number_of_shards_is_another_order() -> None:
    """The terms cancel in pairs, so that nothing but the rounding of the order is left and bf16 cannot hide it."""
    h, w, dlogits = _inputs()
    w = torch.cat([w[: VOCAB // 2], -w[: VOCAB // 2].flip(0)])
    dlogits = torch.cat([dlogits[:, : VOCAB // 2], dlogits[:, : VOCAB // 2].flip(1)], 1)
    gradients = [_both_ways(h, w, dlogits, grad_splits)[1] for grad_splits in (1, 2, 4, 8)]
    assert not any(_same(gradients[-1], other) for other in gradients[:-1])


def test_weight_gradient_is_the_library_s() -> None:
    h, _, dlogits = _inputs()
    assert _same(lm_head_weight_grad(h, dlogits, *_leaves()), det_gemm_weight_grad(h, dlogits, *_leaves()))


def test_forward_and_gradients_are_accurate(assert_accurate: Check) -> None:
    h, w, dlogits = _inputs()
    logits, dh = _both_ways(h, w, dlogits)
    exact = h.float().requires_grad_()
    reference.lm_head(exact, w).backward(dlogits.float())
    assert exact.grad is not None
    assert_accurate("lm_head", FORWARD_ACCURACY, logits, reference.lm_head(h, w))
    assert_accurate("lm_head", GRADIENT_ACCURACY, dh, exact.grad)
    assert_accurate("lm_head", GRADIENT_ACCURACY, lm_head_weight_grad(h, dlogits, *_leaves()), dlogits.float().T @ h.float())


def test_rows_do_not_depend_on_batch_place_or_threads(assert_rows_invariant: Check) -> None:
    h, w, dlogits = _inputs()
    assert_rows_invariant(lambda h, dlogits: _both_ways(h, w, dlogits), h, dlogits)


def test_weight_gradient_keeps_its_bytes_in_every_layout(assert_leaves_invariant: Check) -> None:
    h, _, dlogits = _inputs()
    assert_leaves_invariant(lm_head_weight_grad, h, dlogits)


def test_padded_vocabulary_rows_give_plus_zero_and_change_nothing() -> None:
    h, w, _ = _inputs()
    padded = torch.cat([w, torch.zeros(24, HIDDEN, dtype=w.dtype)])
    logits = lm_head(h, padded)
    assert _same(logits[:, :VOCAB], lm_head(h, w))
    assert _same(logits[:, VOCAB:], torch.zeros(WS1.packed, 24))


def test_custom_operators_are_well_formed() -> None:
    h, w, dlogits = _inputs(5)
    torch.library.opcheck(torch.ops.rlk.lm_head.default, (h.clone().requires_grad_(), w, 1, 8, torch.float32))
    torch.library.opcheck(torch.ops.rlk.lm_head_input_grad.default, (dlogits, w, 8))


def test_it_is_read_back_under_its_own_name() -> None:
    reset_readback()
    _both_ways(*_inputs())
    h, _, dlogits = _inputs()
    lm_head_weight_grad(h, dlogits, *_leaves())
    assert {r.op: r.calls for r in readback()} == {"lm_head": 1, "lm_head.input_grad": 1, "lm_head.weight_grad": 1}


def test_wrong_operands_are_refused() -> None:
    h, w, dlogits = _inputs()
    with pytest.raises(ValueError, match=r"lm_head: x .* must both be bf16"):
        lm_head(h.float(), w)
    with pytest.raises(ValueError, match=r"lm_head: x .* must be \[T, K\]"):
        lm_head(h, w[:, 1:])
    with pytest.raises(ValueError, match="lm_head: grad_splits=8 must be a power of two that divides 263"):
        lm_head(h, w[1:])
    with pytest.raises(ValueError, match="lm_head: leaf_offsets"):
        lm_head_weight_grad(h, dlogits, torch.arange(4), torch.tensor([0, 5]))
    with pytest.raises(BackendUnavailable, match="triton"):
        lm_head(h, w, backend="triton")
