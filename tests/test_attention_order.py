"""attention: the specified order once more, in float32 numpy, against the backend's bytes; and controls that a wrong order shows.

Products of two bf16 values are exact in float32, so a fused multiply-add is a product and a sum there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from rlk.contract.numerics import DEFAULT
from rlk.kernels.attention import attention, attention_with_lse

TILE, SPLIT = DEFAULT.kv_tile, DEFAULT.kv_split
F = np.float32
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Sequence(NamedTuple):
    """One sequence, bf16: q, d_out [T, Hq, D], k, v [T, Hk, D]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5


def make(length: int, heads: int = 4, kv_heads: int = 2, dim: int = 32, seed: int = 7) -> Sequence:
    generator = torch.Generator().manual_seed(seed)
    return Sequence(*(torch.randn(length, h, dim, generator=generator).bfloat16() for h in (heads, kv_heads, kv_heads, heads)))


def cancelling(length: int, heads: int = 4, kv_heads: int = 2, dim: int = 32) -> Sequence:
    """Sums over keys and over queries nearly cancel and mix magnitudes, so that bf16 results show the order of fp32 sums."""
    b, noise = make(length, heads, kv_heads, dim), make(length, heads, kv_heads, dim, seed=8)
    position = torch.arange(length)[:, None, None]
    sign, pairs = 1 - 2 * (position % 2), torch.arange(length) // 2
    powers = 2.0 ** torch.randint(0, 12, (4, length, 1, 1), generator=torch.Generator().manual_seed(9))[:, pairs]
    q = powers[0] * (b.q[pairs] + noise.q / 128) / 2**24  # scores near 0: P of row i is about 1/(i+1)
    k = powers[1] * (b.k[pairs] + noise.k / 128)
    v = powers[2] * (sign * b.v[:1] + noise.v / 128)
    d_out = powers[3] * (sign * b.d_out[:1] * (position + 1) + noise.d_out / 128)
    return Sequence(q.bfloat16(), k.bfloat16(), v.bfloat16(), d_out.bfloat16())


def flat(length: int) -> Sequence:
    """Scores near 130 that differ little and values that differ little: t − m, t − LSE₂ and dP − D cancel, so that a fused one shows."""
    b = make(length)
    return Sequence((4 + b.q / 8).bfloat16(), (4 + b.k / 8).bfloat16(), (b.v[:1] + b.v / 128).bfloat16(), b.d_out)


def sharp(length: int) -> Sequence:
    """Scores far apart, so that probabilities span more than 24 bits and the order of their sum shows."""
    b = make(length)
    return b._replace(q=b.q * 4)


def mirrored() -> Sequence:
    """Two splits of nearly equal scores and opposite values: the last row's merge cancels. Many heads, since only one row shows it."""
    b = make(SPLIT, 64, 64, 64)
    noise = make(SPLIT, 64, 64, 64, seed=8)
    return Sequence(*(torch.cat(halves).bfloat16() for halves in ((b.q, b.q), (b.k, b.k + noise.k / 256), (b.v, -b.v), (b.q, b.q))))


def ours(b: Sequence, tile: int = TILE, split: int = SPLIT) -> tuple[torch.Tensor, torch.Tensor]:
    cu_seqlens = torch.tensor([0, len(b.q)])
    return attention_with_lse(b.q, b.k, b.v, cu_seqlens, scale=b.scale, kv_tile=tile, kv_split=split)


def our_gradients(b: Sequence) -> Grads:
    leaves = [x.clone().requires_grad_() for x in (b.q, b.k, b.v)]
    out = attention(*leaves, torch.tensor([0, len(b.q)]), scale=b.scale, kv_tile=TILE, kv_split=SPLIT)
    dq, dk, dv = torch.autograd.grad(out, leaves, b.d_out)
    return dq, dk, dv


def f32(x: torch.Tensor) -> np.ndarray:
    return x.float().numpy()


def bf16(x: np.ndarray) -> np.ndarray:
    return f32(torch.from_numpy(np.asarray(x, F)).bfloat16())


def fma(a: np.ndarray, b: np.ndarray | float, c: np.ndarray | float) -> np.ndarray:
    """Products of two float32 values are exact in float64."""
    return (np.asarray(a, float) * np.asarray(b, F) + np.asarray(c, F)).astype(F)


def exp2(x: np.ndarray | np.float32) -> np.ndarray:
    """2^x by the backend's polynomial."""
    clipped = np.clip(np.asarray(x), F(-200), F(200))
    n, p = np.rint(clipped), np.full_like(clipped, F(1.535336188319500e-4))
    for c in (1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1, 1.0):
        p = fma(p, clipped - n, c)
    return np.ldexp(p, n.astype(int))


def log2(x: np.ndarray) -> np.ndarray:
    """log2 of normal positive values by the backend's polynomial."""
    half, exponent = np.frexp(x)
    low = half < F(0.707106781186547524)
    f, p = np.where(low, half + half, half) - F(1), np.full_like(x, F(7.0376836292e-2))
    for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1):
        p = fma(p, f, c)
    y = fma(f * f, -0.5, f * (f * f) * fma(p, f, 3.3333331174e-1))
    fraction = fma(f, 1.44269502, fma(y, 1.44269502, f * F(1.92596303e-8)))
    return (exponent - low).astype(F) + fraction


def tree(x: np.ndarray) -> np.ndarray:
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def contract(a: np.ndarray, b: np.ndarray, acc: np.ndarray | None = None, early: int = 0) -> np.ndarray:
    """acc + Σ a[i]·b[i] ([K] · [K, n]) by groups of 16 from 0, the tail +0. ``early`` plants every group edge that many terms early."""
    acc = np.zeros(b.shape[1], F) if acc is None else acc
    products = np.pad(a[:, None] * b, ((early, -(len(a) + early) % 16), (0, 0)))
    for g in range(0, len(products), 16):
        acc = acc + tree(products[g : g + 16])
    return acc


def slow_row(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, c: np.float32, split: int, early: int = 0, shift: int = 0
) -> tuple[np.ndarray, np.float32, np.float32]:
    """o, m, l of one row that sees all of k, v [n, D]. ``early`` plants group edges, ``shift`` tile and split edges, too early."""
    states: list[tuple[np.ndarray, np.float32, np.float32]] = []
    for start in range(-shift, len(k), TILE):
        keys, values = (x[max(start, 0) : start + TILE] for x in (k, v))
        if not states or (split and (start + shift) % split == 0):
            states.append((np.zeros(k.shape[1], F), F(-np.inf), F(0)))
        o, m, total = states[-1]
        t = contract(q, keys.T) * c
        top = max(m, t.max())
        alpha, p = exp2(m - top), bf16(exp2(t - top))
        states[-1] = (contract(p, values, o * alpha, early), top, contract(p, np.ones((len(p), 1), F), total * alpha, early)[0])
    o, m, total = states[0]
    for o2, m2, total2 in states[1:]:
        top = max(m, m2)
        first, second = exp2(m - top), exp2(m2 - top)
        o, m, total = o * first + o2 * second, top, total * first + total2 * second
    return o, m, total


def slow_forward(b: Sequence, rows: range, split: int = SPLIT, early: int = 0, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [rows, Hq, D] bf16 and LSE₂ [rows, Hq]."""
    q, k, v = map(f32, (b.q, b.k, b.v))
    c, heads, group = F(b.scale * math.log2(math.e)), range(q.shape[1]), q.shape[1] // k.shape[1]
    states = [[slow_row(q[i, h], k[: i + 1, h // group], v[: i + 1, h // group], c, split, early, shift) for h in heads] for i in rows]
    o, m, total = (np.array([[state[i] for state in row] for row in states]) for i in range(3))
    return torch.from_numpy(o / total[..., None]).bfloat16(), torch.from_numpy(m + log2(total))


def slow_gradients(b: Sequence, out: torch.Tensor, lse2: torch.Tensor, early: int = 0) -> Grads:
    """dQ, dK, dV, bf16."""
    q, k, v, d_out = map(f32, (b.q, b.k, b.v, b.d_out))
    (n, heads, dim), group = q.shape, q.shape[1] // k.shape[1]
    c, scale = F(b.scale * math.log2(math.e)), F(b.scale)
    p, ds = np.zeros((heads, n, n), F), np.zeros((heads, n, n), F)
    for i in range(n):
        for h in range(heads):
            keys, values = k[: i + 1, h // group], v[: i + 1, h // group]
            delta = tree(np.pad(f32(out)[i, h] * d_out[i, h], (0, (1 << (dim - 1).bit_length()) - dim)))
            prob = exp2(contract(q[i, h], keys.T) * c - f32(lse2)[i, h])
            p[h, i, : i + 1], ds[h, i, : i + 1] = bf16(prob), bf16(prob * (contract(d_out[i, h], values.T) - delta))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for h in range(heads):
        for i in range(n):  # i is a query for dq and a key for dk, dv, whose earlier queries hold +0 in p and ds
            dq[i, h] = contract(ds[h, i, : i + 1], k[: i + 1, h // group], early=early)
            dk[i, h // group] = contract(ds[h, :, i], q[:, h], dk[i, h // group], early)
            dv[i, h // group] = contract(p[h, :, i], d_out[:, h], dv[i, h // group], early)
    dq, dk, dv = (torch.from_numpy(x).bfloat16() for x in (dq * scale, dk * scale, dv))
    return dq, dk, dv


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements with other bytes; both must be finite, of one shape and dtype."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert a.isfinite().all()
    as_integers = {torch.bfloat16: torch.int16, torch.float32: torch.int32}[a.dtype]
    return int((a.contiguous().view(as_integers) != b.contiguous().view(as_integers)).sum())


LENGTH = SPLIT + 7
CASES = {
    "random": make(LENGTH),
    "sharp": sharp(LENGTH),
    "flat": flat(LENGTH),
    "cancelling": cancelling(LENGTH),
    "dim40": cancelling(LENGTH, 4, 4, 40),
}


@pytest.mark.parametrize("b", CASES.values(), ids=CASES.keys())
def test_bytes_are_those_of_the_specified_order(b: Sequence) -> None:
    for split in (0, SPLIT):
        out, lse2 = ours(b, split=split)
        slow_out, slow_lse2 = slow_forward(b, range(len(b.q)), split)
        assert differing(out, slow_out) == 0
        assert differing(lse2, slow_lse2) == 0
    for name, fast, slow in zip("qkv", our_gradients(b), slow_gradients(b, out, lse2)):
        assert differing(fast, slow) == 0, name


def test_splits_are_merged_without_fused_operations() -> None:
    b = mirrored()
    out, lse2 = ours(b)
    slow_out, slow_lse2 = slow_forward(b, range(2 * SPLIT - 1, 2 * SPLIT))
    assert differing(out[-1:], slow_out) == 0
    assert differing(lse2[-1:], slow_lse2) == 0


def test_another_tile_or_split_is_other_bytes() -> None:
    b = make(300)
    for tile, split in ((TILE, 0), (TILE, 2 * SPLIT), (2 * TILE, SPLIT)):
        assert differing(ours(b)[0], ours(b, tile, split)[0]) > 1000, (tile, split)


def test_a_misplaced_tile_edge_is_other_bytes() -> None:
    b, rows = make(170), range(150, 170)
    assert differing(ours(b)[0][150:], slow_forward(b, rows)[0]) == 0
    assert differing(ours(b)[0][150:], slow_forward(b, rows, shift=5)[0]) > 100


def test_a_misplaced_group_edge_is_other_bytes() -> None:
    """Groups of keys and of queries one term early show in the output and in each gradient."""
    b = cancelling(LENGTH)
    out, lse2 = ours(b)
    pairs = zip((out, *our_gradients(b)), (slow_forward(b, range(len(b.q)), early=1)[0], *slow_gradients(b, out, lse2, early=1)))
    counts = [differing(fast, slow) for fast, slow in pairs]
    assert min(counts) >= 3, counts
