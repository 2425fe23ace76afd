"""Every figure of docs/contract.md, recomputed: each test looks for its own results on the page."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from rlk.contract import packing, topology, vocabulary
from rlk.contract.models import QWEN3_8B
from rlk.contract.orders import attention_splits, attention_tiles, fold_halves, fold_pairs, groups
from rlk.kernels.det_gemm import hopper
from rlk.kernels.sampling import cpu as sampling

Array = npt.NDArray[np.float32]
PAGE = " ".join((Path(__file__).parents[1] / "docs" / "contract.md").read_text().replace("\n>", "\n").replace("−", "-").split())
f32 = np.float32


def stated(*fragments: str) -> None:
    for fragment in fragments:
        assert fragment in PAGE, f"docs/contract.md does not say {fragment!r}"


def bf16(values: npt.ArrayLike) -> Array:
    return torch.from_numpy(np.array(values, dtype=np.float32)).bfloat16().float().numpy()


def normal(seed: int, *shape: int) -> Array:
    return np.random.RandomState(seed).randn(*shape).astype(np.float32)


def share(a: Array, b: Array) -> str:
    return f"{100 * np.mean(a.view(np.uint32) != b.view(np.uint32)):.0f} %"


def plus(a: Array, b: Array) -> Array:
    return a + b


def add(a: float, b: float) -> float:
    return float(f32(a) + f32(b))


def grouped(products: Array, edges: list[range]) -> Array:
    """Sum over the last axis: one accumulator from +0, one addition per group, a group by the row tree."""
    total = np.zeros(products.shape[:-1], np.float32)
    for group in edges:
        total = total + fold_halves([products[..., k] for k in group], plus, np.zeros_like(total))
    return total


def logprob(z: list[float]) -> float:
    return z[0] - math.log(sum(math.exp(v) for v in z))


def test_one_rounding() -> None:
    terms = [1.0, 2**-8, 2**-8, 2**-8]
    in_bf16: Callable[[float, float], float] = lambda a, b: float(bf16(a + b))
    stated(
        f"from the left: {reduce(in_bf16, terms)},", f"by pairs: {fold_pairs(terms, in_bf16)}.", f"rounded once: {float(bf16(sum(terms)))}."
    )


def _x_hat(x: Array) -> Array:
    squares = fold_halves([x[:, i] * x[:, i] for i in range(x.shape[1])], plus, np.zeros(x.shape[0], np.float32))
    return x * (f32(1) / np.sqrt(squares / f32(x.shape[1]) + f32(1e-6)))[:, None]


def test_rounding_points() -> None:
    random = np.random.RandomState(4)
    make: Callable[..., Array] = lambda *shape: random.randn(*shape).astype(np.float32)
    residual, gamma = bf16(make(64, 128)) + bf16(make(64, 128)), bf16(1 + f32(0.1) * make(128))
    ours = bf16(bf16(_x_hat(bf16(residual))) * gamma)
    stated(f"reads it before: {share(ours, bf16(bf16(_x_hat(residual)) * gamma))} of the bf16")
    stated(f"Multiplying first: {share(ours, bf16(_x_hat(bf16(residual)) * gamma))} of the bf16")
    gate, up = bf16(normal(9, 4096)), bf16(normal(10, 4096))
    silu = (gate / (1 + np.exp(-gate.astype(np.float64)))).astype(np.float32)
    stated(f"on the way: {share(bf16(silu * up), bf16(bf16(silu) * up))} of the bf16")


def test_logits_stay_fp32() -> None:
    rounded = [float(v) for v in bf16([20.0625, 20.0])]
    assert rounded == [20.0, 20.0]
    stated(f"first logprob is {logprob([20.0625, 20.0]):.6f}", f"it is {logprob(rounded):.6f}")


def test_group_edges() -> None:
    planted = np.zeros(32, np.float32)
    planted[[0, 15, 16]] = 2**24, 1, 1
    stated(
        f"is lost, {grouped(planted, list(groups(32))):.0f}.",
        f"meet first, {grouped(planted, [range(15), range(15, 31), range(31, 32)]):.0f}.",
    )
    random = np.random.RandomState(0)
    products = bf16(random.randn(4096, 128)) * bf16(random.randn(4096, 128))
    ours = grouped(products, list(groups(128)))
    moved = grouped(products, [range(8), *groups(120, first=8)])
    chain = grouped(products, [range(k, k + 1) for k in range(128)])
    stated(f"8 instead of 16: share {share(ours, moved)}", f"(share {share(ours, chain)})")


def test_pair_tree() -> None:
    stated(fold_pairs([f"p{i}" for i in range(8)], lambda a, b: f"({a}+{b})")[1:-1])
    planted = [1.0, *[2.0**-24] * 7]
    stated(f"Left to right: {reduce(add, planted)}.", f"Pair tree: {fold_pairs(planted, add):.10f}.")
    p = list(normal(1, 8, 4096))
    tree = fold_pairs(p, plus)
    adjacent = fold_pairs([fold_pairs([p[s] for s in topology.owned(4, rank)], plus) for rank in range(4)], plus)
    strided = fold_pairs([plus(p[rank], p[rank + 4]) for rank in range(4)], plus)
    stated(f"right share {share(tree, reduce(plus, p))};", f"first share {share(tree, adjacent)};", f"s + 4 share {share(tree, strided)}.")


def test_packed_rows() -> None:
    order = packing.qkv_order(q_heads=2, kv_heads=2, head_dim=1)
    names = ["q₀", "q₁", "k₀", "k₁", "v₀", "v₁"]
    stated(f"rows {' '.join(map(str, order))}, that is {' '.join(names[row] for row in order)}.")


def test_token_leaves() -> None:
    listed = lambda positions: ", ".join(map(str, positions))
    assert topology.block_size(19) == 2
    assert topology.padded_length(19) == 32
    stated(
        "19 tokens: w = 2, padded to 32.", "Leaf 6 holds tokens 12, 13 and 18;", f"leaf 7 holds {listed(topology.leaf_positions(19, 7))}."
    )
    assert topology.leaf_positions(19, 6) == (12, 13, 18)
    assert [p for p in topology.zigzag_positions(19, 2, 0) if p < 19] == list(range(8))
    assert list(topology.owned(2, 0)) == [0, 1, 2, 3]
    chunk = 20 // 4
    assert [p for c in (0, 3) for p in range(c * chunk, (c + 1) * chunk) if p < 19] == [0, 1, 2, 3, 4, 15, 16, 17, 18]
    stated("leaves 0 … 3: tokens 0 … 7.", "tokens 0 … 4 and 15 … 18")
    held = [topology.interleaved_positions(6, 2, rank) for rank in range(2)]
    stated("hold 0 2 4 and 1 3 5.", f"rows {' '.join(map(str, topology.restore_order(held, 6)))} and")
    assert held == [(0, 2, 4), (1, 3, 5)]


def test_micro_batches() -> None:
    a, b, c = normal(3, 3, 4096)
    stated(f"random a, b, c: share {share((a + b) + c, a + (b + c))}.")


def test_row_tree() -> None:
    planted = [2.0**-24, 1.0, 2.0**-24, 0.0]
    stated(f"2⁻²³ + 1 = {fold_halves(planted, add, 0.0):.10f}.")
    assert fold_pairs(planted, add) == reduce(add, planted) == 1.0


def test_equal_copies() -> None:
    value = normal(2, 4096)
    stated(f"divided by 8: share {share(value, reduce(plus, [value] * 8) / f32(8))}")


def _attention(scores: Array, v: Array, splits: list[range]) -> Array:
    """Online softmax over tiles of 32 in base 2, one state per split, states merged ascending."""
    exp2: Callable[[Array], Array] = lambda x: np.exp2(x.astype(np.float64)).astype(np.float32)
    states = []
    for split in splits:
        m = np.full(len(scores), -np.inf, np.float32)
        norm, o = np.zeros(len(scores), np.float32), np.zeros((len(scores), v.shape[1]), np.float32)
        for tile in attention_tiles(len(split)):
            keys = [split.start + k for k in tile]
            t = scores[:, keys]
            new = np.maximum(m, t.max(1))
            p, alpha = bf16(exp2(t - new[:, None])), exp2(m - new)
            norm, o, m = norm * alpha, o * alpha[:, None], new
            for group in groups(len(keys)):
                norm = norm + grouped(p, [group])
                o = o + grouped(np.swapaxes(p[:, :, None] * v[keys], 1, 2), [group])
        states.append((m, norm, o))
    m, norm, o = states[0]
    for m2, norm2, o2 in states[1:]:
        new = np.maximum(m, m2)
        a, b = exp2(m - new), exp2(m2 - new)
        norm, o, m = norm * a + norm2 * b, o * a[:, None] + o2 * b[:, None], new
    return bf16(o / norm[:, None])


def test_attention_splits() -> None:
    random = np.random.RandomState(8)
    scores, v = (random.randn(64, 192) * 2).astype(np.float32), bf16(random.randn(192, 32))
    ours = _attention(scores, v, list(attention_splits(192)))
    stated(f"instead of three: {share(ours, _attention(scores, v, [range(192)]))} of the bf16")
    stated(f"instead of from 0: {share(ours, _attention(scores, v, [range(100), range(100, 164), range(164, 192)]))}.")


def test_rope_without_fma() -> None:
    random = np.random.RandomState(5)
    q, angle = bf16(random.randn(4096, 2)), random.rand(4096) * 512
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    fused = (q[:, 0].astype(np.float64) * cos - (q[:, 1] * sin).astype(np.float64)).astype(np.float32)
    stated(f"fused multiply-add: share {share(q[:, 0] * cos - q[:, 1] * sin, fused)}.")


def test_temperature_divides_once() -> None:
    stated(f"T = 0.7: {logprob([2 / 0.7, 0]):.6f}.", f"twice: {logprob([2 / 0.49, 0]):.6f}.", f"Not divided: {logprob([2, 0]):.6f}.")


def test_temperature_is_a_tensor() -> None:
    quotient: Callable[[Array], Array] = lambda z: z / f32(0.7)
    product: Callable[[Array], Array] = lambda z: z * f32(1 / 0.7)
    bits = lambda value: f"{int(value.view(np.uint32)[0]):08x}"
    five = np.array([5], np.float32)
    stated(f"the quotient is {bits(quotient(five))}, the product {bits(product(five))}.")
    z = normal(6, 4096) * f32(4)
    stated(f"On random logits: share {share(quotient(z), product(z))}.")


def test_vocabulary() -> None:
    shards = vocabulary.vocabulary_shards(QWEN3_8B.vocab_size)
    tiles = vocabulary.vocabulary_tiles(shards[3])
    assert [len(t) for t in tiles] == [1024] * 18 + [640]
    stated(f"151936 → {shards[-1].stop} = {len(shards)} × {len(shards[0])}, 18 tiles of 1024 and one of 640")
    assert QWEN3_8B.vocab_size % 64 == 0
    stated(f"shards of {QWEN3_8B.vocab_size // 8}:", f"`vocabulary.padding_size()` = {vocabulary.padding_size()}.")


def test_support_is_a_mask() -> None:
    s = 2.0**-24
    in_place, compacted = fold_halves([1.0, s, 0.0, s], add, 0.0), fold_halves([1.0, s, s], add, 0.0)
    stated(f"in place {in_place:.10f}, compacted {compacted}.")
    assert math.isnan(torch.exp(torch.tensor(-math.inf) - torch.tensor(-math.inf)).item())


def test_kept_mass() -> None:
    z = [2.0, 1.0, 0.0, -1.0]
    mass = sum(map(math.exp, z[:2])) / sum(map(math.exp, z))
    stated(f"mass {mass:.6f}.", f"off by {logprob(z) - logprob(z[:2]):.6f} at every token")


def test_weights_are_integers() -> None:
    weights = np.array([1.0, *[2.0**-26] * 64], np.float32)
    integers = sampling.weights(np.log(weights.astype(np.float64)).astype(np.float32))
    assert integers.cumsum()[-1] == integers[::-1].cumsum()[-1]
    stated(
        f"largest first: {weights.cumsum()[-1]}; smallest first: {weights[::-1].cumsum()[-1]:.10f},",
        f"in any order: {integers.sum()}.",
    )


def test_normalisation_before_the_first_rounding() -> None:
    d = np.random.RandomState(7).rand(4096).astype(np.float32)
    stated(f"rounding or after: {share(bf16(d / f32(27)), bf16(bf16(d) / f32(27)))} of the bf16")


def test_small_steps_do_not_flip_bf16_weights() -> None:
    weight = float(bf16(0.02))
    stated(f"A bf16 weight of {weight} ")
    assert float(bf16(weight + 2**-13)) == weight + 2**-13
    steps = next(n for n in range(1, 1000) if float(bf16(weight + n * 5e-7)) != weight)
    stated("2⁻¹⁴ = 6.1e-5", f"{steps} steps at learning rate 5e-7, one at 1e-3")
    assert f"{2**-14:.1e}" == "6.1e-05"
    assert float(bf16(weight + 1e-3)) != weight


def test_signed_zero() -> None:
    zero = f32(-0.0)
    assert zero == f32(0)
    stated(f"bytes {zero.tobytes().hex()} become {(zero + f32(0)).tobytes().hex()}.")


def test_a_group_on_hopper() -> None:
    one, small = torch.ones(1, 16).bfloat16(), torch.full((1, 16), 2.0**-26).bfloat16()
    found = hopper.step(one, small, torch.ones(1)).item()
    stated(f"1 and 16 products of 2⁻²⁶: the instruction gives {found:g}; the exact sum is {1 + 16 * 2**-26:.8f}.")
