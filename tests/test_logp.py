"""logp: accuracy, gradients, invariance, refusals (the order of its sums: test_logp_order.py)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rlk.kernels.dispatch import BackendUnavailable, readback, reset_readback
from rlk.kernels.logp import logp, logp_with_lse, reference, support_mask

VOCAB, PADDED = 290, 1024
QWEN3: dict[str, Any] = {"vocab_size": 151936, "padded_vocab": 152576}
BAD_NUMBERS = [math.nan, math.inf]


def _inputs(rows: int = 17, width: int = VOCAB, vocab: int = VOCAB) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    logits = 4 * torch.randn(rows, width, generator=generator)
    temperature = torch.tensor([1.0, 0.7, 0.3, 1.7])[torch.arange(rows) % 4]
    return logits, torch.randint(vocab, (rows,), generator=generator), temperature


def _score(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    *,
    vocab_size: int = VOCAB,
    padded_vocab: int = PADDED,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """logp, lse and dlogits for a seed that differs in every row."""
    leaf = logits.detach().clone().requires_grad_()
    result, lse = logp_with_lse(leaf, ids, temperature, vocab_size=vocab_size, padded_vocab=padded_vocab, **options)
    result.backward(torch.arange(1, ids.shape[0] + 1) / 3)
    assert leaf.grad is not None
    return result.detach(), lse, leaf.grad


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and torch.equal(actual.contiguous().view(torch.int32), expected.contiguous().view(torch.int32))


@pytest.mark.parametrize("shape", [{"vocab_size": VOCAB, "padded_vocab": PADDED}, QWEN3])
def test_accuracy(shape: dict[str, Any]) -> None:
    logits, ids, temperature = _inputs(3, shape["vocab_size"], shape["vocab_size"])
    score, _, dlogits = _score(logits, ids, temperature, **shape)
    exact = logits.double().requires_grad_()
    expected = reference.logp(exact, ids, temperature, shape["vocab_size"])
    expected.backward(torch.arange(1, 4) / 3)
    torch.testing.assert_close(score.double(), expected.detach(), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(dlogits.double(), exact.grad, atol=1e-6, rtol=2**-8)
    assert _same(dlogits, dlogits.bfloat16().float())


def test_row_does_not_depend_on_batch_or_position() -> None:
    logits, ids, temperature = _inputs()
    score, lse = logp_with_lse(logits, ids, temperature, vocab_size=VOCAB, padded_vocab=PADDED)
    order = torch.randperm(17, generator=torch.Generator().manual_seed(5))
    moved = logp_with_lse(logits[order], ids[order], temperature[order], vocab_size=VOCAB, padded_vocab=PADDED)
    assert _same(moved[0], score[order])
    assert _same(moved[1], lse[order])
    for row in range(17):
        alone = logp_with_lse(*(x[row : row + 1] for x in (logits, ids, temperature)), vocab_size=VOCAB, padded_vocab=PADDED)
        assert _same(alone[0], score[row : row + 1])
        assert _same(alone[1], lse[row : row + 1])


def test_qwen3_rows_do_not_depend_on_batch_or_width() -> None:
    logits, ids, temperature = _inputs(3, QWEN3["padded_vocab"], QWEN3["vocab_size"])
    whole = _score(logits, ids, temperature, **QWEN3)
    narrow = _score(logits[:, : QWEN3["vocab_size"]], ids, temperature, **QWEN3)
    assert _same(whole[0], narrow[0])
    assert _same(whole[1], narrow[1])
    assert _same(whole[2][:, : QWEN3["vocab_size"]], narrow[2])
    assert _same(whole[2][:, QWEN3["vocab_size"] :], torch.zeros(3, 640))
    assert _same(logp(logits[2:], ids[2:], temperature[2:], **QWEN3), whole[0][2:])


def test_threads_change_nothing() -> None:
    logits, ids, temperature = _inputs()
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(_score(logits, ids, temperature))
    finally:
        torch.set_num_threads(before)
    assert all(_same(x, y) for other in results[1:] for x, y in zip(other, results[0], strict=True))


@pytest.mark.parametrize("width", [VOCAB, VOCAB + 10, PADDED])
def test_width_and_padding_change_nothing(width: int) -> None:
    logits, ids, temperature = _inputs()
    wide = torch.full((17, width), math.nan)
    wide[:, :VOCAB] = logits
    expected, actual = _score(logits, ids, temperature), _score(wide, ids, temperature)
    assert _same(actual[0], expected[0])
    assert _same(actual[1], expected[1])
    assert _same(actual[2][:, :VOCAB], expected[2])
    assert _same(actual[2][:, VOCAB:], torch.zeros(17, width - VOCAB))


def test_support_as_mask_or_as_truncation() -> None:
    logits, _, temperature = _inputs()
    ids = torch.arange(17)
    cut = 200
    masked = _score(logits, ids, temperature, support=support_mask([range(cut)] * 17, VOCAB))
    truncated = _score(logits[:, :cut], ids, temperature)
    assert _same(masked[0], truncated[0])
    assert _same(masked[2][:, :cut], truncated[2])
    assert _same(masked[2][:, cut:], torch.zeros(17, VOCAB - cut))
    whole = _score(logits, ids, temperature, support=support_mask([None] * 17, VOCAB))
    assert all(_same(x, y) for x, y in zip(whole, _score(logits, ids, temperature), strict=True))


def test_a_compacted_support_gives_other_bytes() -> None:
    logits, _, temperature = _inputs(64)
    kept = torch.arange(0, VOCAB, 3)
    ids = kept[torch.arange(64)]
    in_place = _score(logits, ids, temperature, support=support_mask([kept.tolist()] * 64, VOCAB))[0]
    compacted = _score(logits[:, kept].contiguous(), torch.arange(64), temperature)[0]
    torch.testing.assert_close(compacted, in_place, atol=1e-5, rtol=0)
    assert not _same(compacted, in_place)


def test_temperature_as_a_reciprocal_gives_other_bytes() -> None:
    logits, ids, _ = _inputs(64)
    divided = logp(logits, ids, torch.full((64,), 0.7), vocab_size=VOCAB, padded_vocab=PADDED)
    multiplied = logp(logits * (1 / torch.tensor(0.7)), ids, torch.ones(64), vocab_size=VOCAB, padded_vocab=PADDED)
    torch.testing.assert_close(multiplied, divided, atol=1e-4, rtol=0)
    assert not _same(multiplied, divided)


@pytest.mark.parametrize("columns", [[0], [289], [0, 289], [127, 128], [5, 200]])
def test_shards_without_support(columns: list[int]) -> None:
    logits, _, temperature = _inputs(4)
    ids = torch.full((4,), columns[-1])
    support = support_mask([columns] * 4, VOCAB)
    score, _, dlogits = _score(logits, ids, temperature, support=support)
    expected = reference.logp(logits.double(), ids, temperature, VOCAB, support)
    torch.testing.assert_close(score.double(), expected, atol=1e-5, rtol=1e-6)
    assert _same(dlogits[~support], torch.zeros(int((~support).sum())))
    if len(columns) == 1:
        assert _same(score, torch.zeros(4))


def _small(z: list[float], selected: int, temperature: float = 1.0, **options: Any) -> float:
    return float(
        logp(
            torch.tensor([z], dtype=torch.float32),
            torch.tensor([selected]),
            torch.tensor([temperature]),
            vocab_size=len(z),
            padded_vocab=1024,
            **options,
        )
    )


def test_temperature_is_applied_once() -> None:
    assert _small([2, 0], 0, 0.7) == pytest.approx(-0.055844, abs=1e-6)
    assert _small([2 / 0.7, 0], 0, 0.7) == pytest.approx(-0.016739, abs=1e-6)
    assert _small([2, 0], 0) == pytest.approx(-0.126928, abs=1e-6)


def test_kept_mass_is_not_a_bias_between_two_scores_of_one_support() -> None:
    z = [2.0, 1.0, 0.0, -1.0]
    kept = _small(z, 0, support=support_mask([[0, 1]], 4))
    assert kept == pytest.approx(math.log(0.731059), abs=1e-6)
    assert _small(z, 0) - kept == pytest.approx(-0.126928, abs=1e-6)
    assert math.exp(_small(z, 0)) + math.exp(_small(z, 1)) == pytest.approx(0.880797, abs=1e-6)


def test_logits_stay_fp32() -> None:
    z = torch.tensor([[20.0625, 20.0]])
    assert _small(z[0].tolist(), 0) == pytest.approx(-0.662385, abs=2e-6)
    assert _small(z.bfloat16()[0].tolist(), 0) == pytest.approx(-0.693147, abs=2e-6)
    with pytest.raises(ValueError, match="float32"):
        logp(z.bfloat16(), torch.tensor([0]), torch.ones(1), vocab_size=2, padded_vocab=1024)


def test_gradient_reaches_every_shard() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]], requires_grad=True)
    logp(logits, torch.tensor([3]), torch.ones(1), vocab_size=4, padded_vocab=4, shards=2).backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.032, -0.087, -0.237, 0.356]]), atol=1e-3, rtol=0)


def test_one_id_per_row() -> None:
    logits = torch.zeros(1, 8)
    for ids in (torch.tensor([[1, 2, 3]]), torch.tensor([1, 2, 3])):
        with pytest.raises(ValueError, match="one per row"):
            logp(logits, ids, torch.ones(1), vocab_size=8, padded_vocab=1024)


def test_ids_of_inactive_rows_are_never_read() -> None:
    logits, _, temperature = _inputs(3)
    ids = torch.tensor([3, -1, VOCAB + 7])
    active = torch.tensor([True, False, False])
    logits[1:] = math.nan
    score, lse, dlogits = _score(logits, ids, temperature, active=active)
    alone = _score(logits[:1], ids[:1], temperature[:1])
    assert all(_same(x[:1], y) for x, y in zip((score, lse, dlogits), alone, strict=True))
    assert _same(dlogits[1:], torch.zeros(2, VOCAB))
    assert _same(score[1:], torch.zeros(2))
    reset_readback()
    with pytest.raises(ValueError, match=r"row 1 selects id -1"):
        logp(logits, ids, temperature, vocab_size=VOCAB, padded_vocab=PADDED)
    with pytest.raises(ValueError, match=rf"row 2 selects id {VOCAB + 7}"):
        logp(logits, ids, temperature, vocab_size=VOCAB, padded_vocab=PADDED, active=torch.tensor([True, False, True]))
    assert readback() == []


def test_refused_before_any_launch() -> None:
    logits, ids, temperature = _inputs(3, VOCAB + 10)
    shape: dict[str, Any] = {"vocab_size": VOCAB, "padded_vocab": PADDED}
    reset_readback()
    with pytest.raises(ValueError, match=rf"row 1 selects id {VOCAB}"):
        logp(logits, torch.tensor([0, VOCAB, 0]), temperature, **shape)
    supports = support_mask([None, None, [1, 2]], VOCAB, width=VOCAB + 10)
    with pytest.raises(ValueError, match="row 2 selects id 7, outside its own support"):
        logp(logits, torch.tensor([0, 0, 7]), temperature, **shape, support=supports)
    supports[1, VOCAB + 3] = True
    with pytest.raises(ValueError, match=rf"row 1 supports id {VOCAB + 3}"):
        logp(logits, torch.tensor([0, 0, 1]), temperature, **shape, support=supports)
    for bad in (0.0, -1.0, *BAD_NUMBERS):
        with pytest.raises(ValueError, match="row 2 has temperature"):
            logp(logits, ids, torch.tensor([1.0, 1.0, bad]), **shape)
    for wrong in ({"shards": 3}, {"padded_vocab": 292}, {"padded_vocab": 256}, {"vocab_tile": 0}):
        with pytest.raises(ValueError, match="padded_vocab"):
            logp(logits, ids, temperature, **{**shape, **wrong})
    with pytest.raises(ValueError, match="row 0 holds id 290"):
        support_mask([[0, 290]], VOCAB)
    with pytest.raises(BackendUnavailable):
        logp(logits, ids, temperature, **shape, backend="triton")
    assert readback() == []


@pytest.mark.parametrize("bad", BAD_NUMBERS)
def test_nan_is_never_hidden(bad: float) -> None:
    logits, _, temperature = _inputs(3)
    ids = torch.tensor([0, 1, 2])
    clean = _score(logits, ids, temperature)
    logits[1] = -math.inf
    logits[1, 200] = bad
    poisoned = _score(logits, ids, temperature)
    assert all(x[1].isnan().any() for x in poisoned)
    assert all(_same(x[::2], y[::2]) for x, y in zip(poisoned, clean, strict=True))
    support = torch.ones(3, VOCAB, dtype=torch.bool)
    support[:, 200] = False
    off_support = _score(logits[::2].index_fill(1, torch.tensor([200]), bad), ids[::2], temperature[::2], support=support[::2])
    assert not any(x.isnan().any() for x in off_support)


def test_a_gradient_off_the_support_is_plus_zero() -> None:
    logits, ids, temperature = _inputs(1)
    leaf = logits.requires_grad_()
    support = torch.zeros(1, VOCAB, dtype=torch.bool)
    support[0, ids] = True
    logp(leaf, ids, temperature, vocab_size=VOCAB, padded_vocab=PADDED, support=support).backward(torch.tensor([-1.0]))
    assert leaf.grad is not None
    multiplied_away = torch.tensor([-1.0]) * torch.zeros(1)
    assert leaf.grad[~support].view(torch.int32).eq(0).all()
    assert multiplied_away == 0.0
    assert multiplied_away.view(torch.int32).item() != 0


def test_no_rows() -> None:
    empty = logp(torch.empty(0, VOCAB), torch.empty(0, dtype=torch.int64), torch.empty(0), vocab_size=VOCAB, padded_vocab=PADDED)
    assert empty.shape == (0,)


def test_operators_are_well_formed_and_report_themselves() -> None:
    logits, ids, temperature = _inputs(3)
    reset_readback()
    _, lse, _ = _score(logits, ids, temperature)
    assert [(ran.op, ran.backend, ran.calls) for ran in readback()] == [("logp", "cpu", 1), ("logp.backward", "cpu", 1)]
    assert not lse.requires_grad
    support, active = support_mask([None] * 3, VOCAB), torch.ones(3, dtype=torch.bool)
    for options in ((None, None), (support, active)):
        torch.library.opcheck(torch.ops.rlk.logp, (logits.clone().requires_grad_(), ids, temperature, *options, VOCAB, PADDED, 8, 1024))
        torch.library.opcheck(torch.ops.rlk.logp_backward, (logits, ids, temperature, *options, lse, torch.ones(3), VOCAB))
