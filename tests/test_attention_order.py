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
    """One sequence whose sums over keys and over queries nearly cancel and mix magnitudes, so that bf16 results show their order."""
    batch, noise = make(length, heads, kv_heads, dim), make(length, heads, kv_heads, dim, seed=8)
    position = torch.arange(length)[:, None, None]
    sign, pairs = 1 - 2 * (position % 2), torch.arange(length) // 2
    powers = 2.0 ** torch.randint(0, 12, (4, length, 1, 1), generator=torch.Generator().manual_seed(9))[:, pairs]
    q = powers[0] * (batch.q[pairs] + noise.q / 128) / 2**24  # scores near 0: P of row i is about 1/(i+1)
    k = powers[1] * (batch.k[pairs] + noise.k / 128)
    v = powers[2] * (sign * batch.v[:1] + noise.v / 128)
    d_out = powers[3] * (sign * batch.d_out[:1] * (position + 1) + noise.d_out / 128)
    return Sequence(q.bfloat16(), k.bfloat16(), v.bfloat16(), d_out.bfloat16())


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


def exp2(x: np.ndarray | np.float32) -> np.ndarray:
    """2^x by the backend's polynomial; products of two float32 values are exact in float64."""
    clipped = np.clip(np.asarray(x), F(-200), F(200))
    n = np.rint(clipped)
    p, f = F(1.535336188319500e-4), (clipped - n).astype(np.float64)
    for c in (1.339887440266574e-3, 9.618437357674640e-3, 5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1, 1.0):
        p = (p * f + np.float64(F(c))).astype(F)
    return np.ldexp(p, n.astype(int))


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
    out = np.array([[o / total for o, _, total in row] for row in states])
    return torch.from_numpy(out).bfloat16(), torch.tensor([[m + math.log2(total) for _, m, total in row] for row in states])


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
    """Elements with other bytes; both must be finite bf16 of one shape."""
    assert a.dtype == b.dtype == torch.bfloat16
    assert a.shape == b.shape
    assert a.isfinite().all()
    return int((a.contiguous().view(torch.int16) != b.contiguous().view(torch.int16)).sum())


@pytest.mark.parametrize(
    "b", [make(SPLIT + 7), cancelling(SPLIT + 7), cancelling(SPLIT + 7, 4, 4, 40)], ids=["random", "cancelling", "dim40"]
)
def test_bytes_are_those_of_the_specified_order(b: Sequence) -> None:
    for split in (0, SPLIT):
        out, lse2 = ours(b, split=split)
        slow_out, slow_lse2 = slow_forward(b, range(len(b.q)), split)
        assert differing(out, slow_out) == 0
        torch.testing.assert_close(lse2.double(), slow_lse2.double(), atol=1e-6, rtol=3e-7)
    for name, fast, slow in zip("qkv", our_gradients(b), slow_gradients(b, out, lse2)):
        assert differing(fast, slow) == 0, name


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
    b = cancelling(SPLIT + 7)
    out, lse2 = ours(b)
    pairs = zip((out, *our_gradients(b)), (slow_forward(b, range(len(b.q)), early=1)[0], *slow_gradients(b, out, lse2, early=1)))
    counts = [differing(fast, slow) for fast, slow in pairs]
    assert min(counts) >= 3, counts
