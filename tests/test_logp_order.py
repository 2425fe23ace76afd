"""logp adds in the order that the contract names: the order again in numpy, without the operator's code, compared to the byte."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rlk.kernels.logp import logp_with_lse

Floats = NDArray[np.float32]
State = tuple[Any, Any]  # maximum and sum, fp32 scalars
F = np.float32


def _same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return actual.shape == expected.shape and torch.equal(actual.view(torch.int32), expected.view(torch.int32))


def _inputs(rows: int, vocab: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows whose largest logit is 0: LSE = log s, so that the last bit of s is seen and not lost in m + log s."""
    generator = torch.Generator().manual_seed(11)
    logits = 4 * torch.randn(rows, vocab, generator=generator)
    temperature = torch.tensor([1.0, 0.7, 0.3, 1.7])[torch.arange(rows) % 4]
    return logits - logits.max(dim=1, keepdim=True).values, torch.randint(vocab, (rows,), generator=generator), temperature


def _fma(a: Any, b: Any, c: Any) -> Any:
    """fp32 a·b + c with one rounding: float64 holds the product; a sum rounded to odd there rounds correctly to fp32."""
    product, addend = np.asarray(a, F).astype(float) * np.asarray(b, F).astype(float), np.asarray(c, F).astype(float)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    even = (total.view(np.int64) & 1) == 0
    return np.where((error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total).astype(F)


def _exp(x: Any) -> Any:
    x = np.clip(x, F(-120), F(120))
    n = np.rint(x * F(1.44269504088896341))
    r = _fma(n, 2.12194440e-4, _fma(n, -0.693359375, x))
    p = np.full_like(x, F(1.9875691500e-4))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = _fma(p, r, c)
    return np.ldexp(_fma(p, r * r, r) + F(1), n.astype(np.int32))


def _log(x: Any) -> Any:
    m, exponent = np.frexp(x)
    if m < F(0.707106781186547524):
        m, exponent = m + m, exponent - 1
    f = m - F(1)
    z, p = f * f, F(7.0376836292e-2)
    for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1,
              3.3333331174e-1):  # fmt: skip
        p = _fma(p, f, c)
    y = _fma(z, -0.5, _fma(F(exponent), -2.12194440e-4, f * z * p))
    return F(_fma(F(exponent), 0.693359375, f + y))


def _tile(t: Floats) -> State:
    top = t.max()
    if top == -np.inf:
        return top, F(0)
    terms = np.where(t == -np.inf, F(0), _exp(t - top))
    terms = np.concatenate([terms, np.zeros((1 << (t.size - 1).bit_length()) - t.size, F)])
    while terms.size > 1:
        terms = terms[: terms.size // 2] + terms[terms.size // 2 :]
    return top, terms[0]


def _merge(a: State, b: State) -> State:
    top = max(a[0], b[0])
    return top, a[1] * _exp(a[0] - top) + b[1] * _exp(b[0] - top)


def _merge_guarded(a: State, b: State) -> State:
    return a if b[0] == -np.inf else b if a[0] == -np.inf else _merge(a, b)


def _oracle_lse(t: Floats, padded: int, shards: int, tile: int, merge: Callable[[State, State], State] = _merge_guarded) -> Any:
    """LSE of one row of z/T, −inf off the support."""
    t = np.concatenate([t, np.full(padded - t.size, -np.inf, F)])
    states = []
    for shard in t.reshape(shards, -1):
        state: State = (F(-np.inf), F(0))
        for begin in range(0, shard.size, tile):
            state = merge(state, _tile(shard[begin : begin + tile]))
        states.append(state)
    while len(states) > 1:
        states = [merge(a, b) for a, b in zip(states[::2], states[1::2], strict=True)]
    return states[0][0] + _log(states[0][1])


def _scaled(logits: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None) -> Floats:
    t = logits.numpy() / temperature.numpy()[:, None]
    return t if support is None else np.where(support.numpy(), t, F(-np.inf))


@pytest.mark.parametrize(
    ("rows", "vocab", "padded", "shards", "tile", "truncated"),
    [
        (16, 37, 64, 4, 5, False),
        (16, 37, 64, 4, 5, True),
        (16, 64, 64, 1, 64, False),
        (16, 290, 1024, 8, 48, True),
        (3, 151936, 152576, 8, 1024, False),
    ],
)
def test_bytes_follow_the_written_order(rows: int, vocab: int, padded: int, shards: int, tile: int, truncated: bool) -> None:
    logits, ids, temperature = _inputs(rows, vocab)
    logits[::2] += 7
    every = torch.arange(rows)
    support = None
    if truncated:
        support = torch.rand(logits.shape, generator=torch.Generator().manual_seed(3)) < 0.4
        support[every, ids] = True
    options: dict[str, Any] = {"vocab_size": vocab, "padded_vocab": padded, "shards": shards, "vocab_tile": tile, "support": support}
    leaf = logits.clone().requires_grad_()
    score, lse = logp_with_lse(leaf, ids, temperature, **options)
    seed = torch.arange(1, rows + 1) / 3
    score.backward(seed)
    assert leaf.grad is not None
    t = _scaled(logits, temperature, support)
    expected_lse = np.array([_oracle_lse(row, padded, shards, tile) for row in t])
    assert _same(lse, torch.from_numpy(expected_lse))
    assert _same(score.detach(), torch.from_numpy(t[every, ids] - expected_lse))
    hit = np.zeros_like(t)
    hit[every, ids] = 1
    gradient = (seed.numpy()[:, None] * (hit - _exp(t - expected_lse[:, None]))) / temperature.numpy()[:, None]
    assert _same(leaf.grad, torch.from_numpy(np.where(t == -np.inf, F(0), gradient)).bfloat16().float())


def _fused_merge(a: State, b: State) -> State:
    top = max(a[0], b[0])
    return top, F(_fma(a[1], _exp(a[0] - top), b[1] * _exp(b[0] - top)))


@pytest.mark.parametrize(
    "planted",
    [
        lambda t: _oracle_lse(t, 512, 8, 16, _fused_merge),
        lambda t: _oracle_lse(t, 512, 8, 15),
        lambda t: _oracle_lse(t, 512, 8, 64),
        lambda t: _oracle_lse(t, 512, 4, 16),
        lambda t: _oracle_lse(t[::-1], 512, 8, 16),
    ],
    ids=["merge with FMA", "tile 15", "one tile", "half the shards", "descending"],
)
def test_a_planted_order_is_seen(planted: Callable[[Floats], Any]) -> None:
    logits, ids, temperature = _inputs(16, 512)
    _, lse = logp_with_lse(logits, ids, temperature, vocab_size=512, padded_vocab=512, vocab_tile=16)
    t = _scaled(logits, temperature, None)
    assert _same(lse, torch.from_numpy(np.array([_oracle_lse(row, 512, 8, 16) for row in t])))
    other = torch.from_numpy(np.array([planted(row) for row in t]))
    torch.testing.assert_close(other, lse, atol=1e-5, rtol=0)
    assert not _same(other, lse)


def test_a_naive_merge_of_an_empty_shard_is_nan() -> None:
    logits, ids, temperature = _inputs(1, 290)  # shards 3 to 7 of 128 columns hold nothing
    t = _scaled(logits, temperature, None)[0]
    with np.errstate(invalid="ignore"):
        assert np.isnan(_oracle_lse(t, 1024, 8, 1024, _merge))
    _, lse = logp_with_lse(logits, ids, temperature, vocab_size=290, padded_vocab=1024)
    assert _same(lse, torch.from_numpy(np.array([_oracle_lse(t, 1024, 8, 1024)])))
