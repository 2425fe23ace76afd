"""batch_invariant_logp: the bytes of lm_head and logp one after another, accuracy, layouts, memory, refusals."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk.contract.judgments import FORWARD_ACCURACY, GRADIENT_ACCURACY
from rlk.contract.topology import token_leaves
from rlk.contract.workloads import WS1
from rlk.kernels.batch_invariant_logp import (
    batch_invariant_logp,
    batch_invariant_logp_weight_grad,
    batch_invariant_logp_with_lse,
    cpu,
    reference,
)
from rlk.kernels.dispatch import BackendUnavailable, readback, reset_readback
from rlk.kernels.lm_head import lm_head, lm_head_weight_grad
from rlk.kernels.logp import logp_with_lse

Check = Callable[..., None]
VOCAB, PADDED, HIDDEN = 8 * 300, 8 * 384, 96
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "padded_vocab": PADDED, "vocab_tile": 100}
LEAVES = token_leaves(WS1.lengths)
INDEX, OFFSETS = torch.tensor(LEAVES.index), torch.tensor(LEAVES.offsets)
Result = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _inputs(rows: int = WS1.packed, width: int = PADDED) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(13)
    w = torch.zeros(width, HIDDEN)
    w[:VOCAB] = torch.randn(min(width, VOCAB), HIDDEN, generator=generator) / 4
    return {
        "h": torch.randn(rows, HIDDEN, generator=generator).bfloat16(),
        "w": w.bfloat16(),
        "ids": torch.randint(VOCAB, (rows,), generator=generator),
        "temperature": torch.tensor([1.0, 0.7, 1.3])[torch.arange(rows) % 3],
        "seed": torch.randn(rows, generator=generator),
    }


def _support(ids: torch.Tensor, width: int = PADDED) -> torch.Tensor:
    mask = torch.rand(len(ids), width, generator=torch.Generator().manual_seed(2)) < 0.3
    mask[::2, : VOCAB // 8] = True
    mask[1::4] = False  # a single supported column
    mask[:, VOCAB:] = False
    mask[torch.arange(len(ids)), ids] = True
    return mask


def _fused(a: dict[str, torch.Tensor], **options: Any) -> Result:
    """logp, lse, dh and dw."""
    h = a["h"].clone().requires_grad_()
    score, lse = batch_invariant_logp_with_lse(h, a["w"], a["ids"], a["temperature"], **SIZES, **options)
    score.backward(a["seed"])
    assert h.grad is not None
    row = a["h"], a["w"], a["ids"], a["temperature"], lse, a["seed"]
    dw = batch_invariant_logp_weight_grad(*row, INDEX, OFFSETS, vocab_size=VOCAB, vocab_tile=77, **options)
    return score.detach(), lse, h.grad, dw


def _composed(a: dict[str, torch.Tensor], **options: Any) -> Result:
    h = a["h"].clone().requires_grad_()
    logits = lm_head(h, a["w"])
    logits.retain_grad()
    score, lse = logp_with_lse(logits, a["ids"], a["temperature"], **SIZES, **options)
    score.backward(a["seed"])
    assert h.grad is not None
    assert logits.grad is not None
    return score.detach(), lse, h.grad, lm_head_weight_grad(a["h"], logits.grad.bfloat16(), INDEX, OFFSETS)


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    view = torch.int16 if actual.dtype == torch.bfloat16 else torch.int32
    return (
        actual.dtype == expected.dtype
        and actual.shape == expected.shape
        and torch.equal(actual.contiguous().view(view), expected.contiguous().view(view))
    )


@pytest.mark.parametrize("support", [False, True], ids=["whole vocabulary", "support"])
@pytest.mark.parametrize("inactive", [False, True], ids=["all rows", "inactive rows"])
def test_bytes_are_those_of_lm_head_and_logp(support: bool, inactive: bool) -> None:
    a = _inputs()
    options = {
        "support": _support(a["ids"]) if support else None,
        "active": torch.arange(WS1.packed) % 3 > 0 if inactive else None,
    }
    assert all(_same(x, y) for x, y in zip(_fused(a, **options), _composed(a, **options), strict=True))


@pytest.mark.parametrize(("forward_rows", "backward_rows"), [(1, 1), (7, 5), (59, 16)])
def test_tiles_of_rows_change_nothing(forward_rows: int, backward_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a = _inputs()
    expected = _fused(a)
    monkeypatch.setattr(cpu, "FORWARD_ROWS", forward_rows)
    monkeypatch.setattr(cpu, "BACKWARD_ROWS", backward_rows)
    assert all(_same(x, y) for x, y in zip(_fused(a), expected, strict=True))


def test_another_vocabulary_tile_is_another_order() -> None:
    a = _inputs()
    row = a["h"], a["w"], a["ids"], a["temperature"]
    scores = [batch_invariant_logp(*row, **{**SIZES, "vocab_tile": tile}) for tile in (100, 64)]
    torch.testing.assert_close(scores[0], scores[1], atol=1e-5, rtol=0)
    assert not _same(scores[0], scores[1])


def test_a_weight_without_its_padding_gives_the_same() -> None:
    a, narrow = _inputs(), _inputs(width=VOCAB)
    whole, short = _fused(a), _fused(narrow)
    assert all(_same(x, y) for x, y in zip(whole[:3], short[:3], strict=True))
    assert _same(whole[3][:VOCAB], short[3])
    assert _same(whole[3][VOCAB:], torch.zeros(PADDED - VOCAB, HIDDEN))


def test_accuracy(assert_accurate: Check) -> None:
    a = _inputs()
    score, lse, dh, dw = _fused(a, support=_support(a["ids"]))
    h, w = a["h"].float().requires_grad_(), a["w"].float().requires_grad_()
    exact, exact_lse = reference.batch_invariant_logp(h, w, a["ids"], a["temperature"], VOCAB, _support(a["ids"]))
    exact.backward(a["seed"])
    assert h.grad is not None
    assert w.grad is not None
    torch.testing.assert_close(score, exact.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, exact_lse.detach(), atol=1e-5, rtol=0)
    assert_accurate("batch_invariant_logp", FORWARD_ACCURACY, score, exact.detach())
    assert_accurate("batch_invariant_logp", GRADIENT_ACCURACY, dh, h.grad)
    assert_accurate("batch_invariant_logp", GRADIENT_ACCURACY, dw, w.grad)


def test_rows_and_their_gradients_are_invariant(assert_rows_invariant: Check) -> None:
    a = _inputs()

    def run(h: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        active = temperature.isfinite()
        leaf = h.clone().requires_grad_()
        score, lse = batch_invariant_logp_with_lse(leaf, a["w"], ids, temperature, **SIZES, active=active)
        score.backward(seed)
        assert leaf.grad is not None
        return score[:, None], lse[:, None], leaf.grad

    assert_rows_invariant(run, a["h"], a["ids"], a["temperature"], a["seed"])


def test_weight_gradient_is_invariant(assert_leaves_invariant: Check) -> None:
    a = _inputs()
    _, lse, _, _ = _fused(a)

    def run(
        h: torch.Tensor, ids: torch.Tensor, t: torch.Tensor, seed: torch.Tensor, lse: torch.Tensor, *leaves: torch.Tensor
    ) -> torch.Tensor:
        return batch_invariant_logp_weight_grad(h, a["w"], ids, t, lse, seed, *leaves, vocab_size=VOCAB, active=t.isfinite())

    assert_leaves_invariant(run, a["h"], a["ids"], a["temperature"], a["seed"], lse)


def test_a_shard_of_the_weight_gradient_is_a_slice_of_it() -> None:
    a = _inputs()
    _, lse, _, dw = _fused(a)
    row = a["h"], a["w"], a["ids"], a["temperature"], lse, a["seed"]
    for wanted in (range(384), range(100, 301), range(VOCAB - 5, PADDED), range(VOCAB, PADDED), range(7, 7)):
        part = batch_invariant_logp_weight_grad(*row, INDEX, OFFSETS, vocab_size=VOCAB, wanted=wanted)
        assert _same(part, dw[wanted.start : wanted.stop])


def _peak_kib(run: Callable[[], object]) -> int:
    """Growth of this process's resident memory while ``run`` ran, at its peak."""
    status = Path("/proc/self/status")
    read = lambda key: int(next(line for line in status.read_text().splitlines() if line.startswith(key)).split()[1])
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = read("VmRSS")
    run()
    return read("VmHWM") - before


def test_logits_are_never_whole() -> None:
    """Forward and backward take less than a quarter of what lm_head and logp take."""
    rows, vocab, padded = 1500, 8 * 1500, 8 * 1536
    h, w = torch.randn(rows, 32).bfloat16(), (torch.randn(padded, 32) / 4).bfloat16()
    ids, temperature, seed = torch.arange(rows), torch.ones(rows), torch.ones(rows)
    sizes: dict[str, Any] = {"vocab_size": vocab, "padded_vocab": padded}
    leaves = torch.arange(rows), torch.tensor([0, rows])

    def composed() -> None:
        leaf = h.clone().requires_grad_()
        logits = lm_head(leaf, w)
        logits.retain_grad()
        logp_with_lse(logits, ids, temperature, **sizes)[0].backward(seed)
        assert logits.grad is not None
        lm_head_weight_grad(h, logits.grad.bfloat16(), *leaves)

    def fused() -> None:
        leaf = h.clone().requires_grad_()
        score, lse = batch_invariant_logp_with_lse(leaf, w, ids, temperature, **sizes)
        score.backward(seed)
        batch_invariant_logp_weight_grad(h, w, ids, temperature, lse, seed, *leaves, vocab_size=vocab)

    fused()  # code and thread pools are loaded outside the measurement
    small, large = _peak_kib(fused), _peak_kib(composed)
    assert large > rows * padded * 8 // 1024, "the measurement does not see whole logits"
    assert small < large / 4, f"{small} KiB against {large} KiB"


def test_refused_before_any_launch() -> None:
    a = _inputs(3)
    row = a["h"], a["w"], a["ids"], a["temperature"]
    reset_readback()
    with pytest.raises(ValueError, match="both be bf16"):
        batch_invariant_logp(a["h"].float(), *row[1:], **SIZES)
    with pytest.raises(ValueError, match=r"\[T, K\] and \[N, K\]"):
        batch_invariant_logp(a["h"][:, 1:], *row[1:], **SIZES)
    with pytest.raises(ValueError, match="row 1 selects id -1"):
        batch_invariant_logp(*row[:2], torch.tensor([0, -1, 2]), row[3], **SIZES)
    with pytest.raises(ValueError, match=f"row 2 selects id {VOCAB}"):
        batch_invariant_logp(*row[:2], torch.tensor([0, 1, VOCAB]), row[3], **SIZES)
    support = _support(a["ids"])
    support[1, a["ids"][1]] = False
    with pytest.raises(ValueError, match=r"row 1 selects id \d+, outside its own support"):
        batch_invariant_logp(*row, **SIZES, support=support)
    for bad in (0.0, math.nan):
        with pytest.raises(ValueError, match="row 0 has temperature"):
            batch_invariant_logp(*row[:3], torch.tensor([bad, 1.0, 1.0]), **SIZES)
    for wrong in ({"shards": 3}, {"padded_vocab": VOCAB}, {"vocab_tile": 0}):
        with pytest.raises(ValueError, match="padded_vocab"):
            batch_invariant_logp(*row, **{**SIZES, **wrong})
    with pytest.raises(BackendUnavailable):
        batch_invariant_logp(*row, **SIZES, backend="vendor")
    leaves = torch.arange(3), torch.tensor([0, 3])
    for lse, options in (
        (torch.zeros(2), {}),
        (torch.zeros(3), {"wanted": range(5, PADDED + 1)}),
        (torch.zeros(3), {"wanted": range(0, 8, 2)}),
    ):
        with pytest.raises(ValueError, match="batch_invariant_logp_weight_grad: "):
            batch_invariant_logp_weight_grad(*row, lse, a["seed"], *leaves, vocab_size=VOCAB, **options)
    assert readback() == []


def test_nan_is_never_hidden() -> None:
    a = _inputs()
    clean = _fused(a)
    a["h"][5] = math.nan
    poisoned = _fused(a)
    assert all(x[5].isnan().all() for x in poisoned[:3])
    others = torch.arange(WS1.packed) != 5
    assert all(_same(x[others], y[others]) for x, y in zip(poisoned[:3], clean[:3], strict=True))
    assert poisoned[3][:VOCAB].isnan().all()


def test_no_rows() -> None:
    a = _inputs(0)
    score = batch_invariant_logp(a["h"], a["w"], a["ids"], a["temperature"], **SIZES)
    assert score.shape == (0,)


def test_operators_are_well_formed_and_report_themselves() -> None:
    a = _inputs()
    reset_readback()
    _, lse, _, _ = _fused(a)
    ran = {(r.op, r.kernel_id.split(":")[1]) for r in readback()}
    parts = ("batch_invariant_logp", "batch_invariant_logp.input_grad", "batch_invariant_logp.weight_grad")
    assert ran == {(op, library) for op in parts for library in ("batch_invariant_logp", "det_gemm")}
    assert not lse.requires_grad
    row = [a[name][:4] for name in ("ids", "temperature")]
    for support, active in ((None, None), (_support(a["ids"])[:4], torch.ones(4, dtype=torch.bool))):
        h = a["h"][:4].clone().requires_grad_()
        torch.library.opcheck(torch.ops.rlk.batch_invariant_logp, (h, a["w"], *row, support, active, VOCAB, PADDED, 8, 100))
