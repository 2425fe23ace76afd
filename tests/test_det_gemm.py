"""det_gemm: the written order to the byte, accuracy, every layout, gradients, refusals; planted orders must be seen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rlk.contract.judgments import FORWARD_ACCURACY, GRADIENT_ACCURACY
from rlk.contract.topology import token_leaves
from rlk.contract.workloads import GEMM_ROWS, WS1
from rlk.kernels.det_gemm import det_gemm, det_gemm_weight_grad, reference
from rlk.kernels.dispatch import BackendUnavailable, readback, reset_readback

Check = Callable[..., None]
Floats = NDArray[np.float32]
F = np.float32
KINDS = ("normal", "cancelling", "huge", "subnormal", "special", "signed_zeros")


def _operands(m: int, k: int, n: int, kind: str = "normal") -> tuple[torch.Tensor, torch.Tensor]:
    """bf16 x [m, k] and w [n, k]."""
    generator = torch.Generator().manual_seed(m * 10007 + k * 101 + n)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    if kind == "cancelling":  # pairs of products that cancel but for a small rest
        x[:, 1::2] = x[:, : 2 * (k // 2) : 2]
        w[:, 1::2] = -w[:, : 2 * (k // 2) : 2] * (1 + 2**-7)
    elif kind == "huge":  # sums and some products overflow
        x, w = x * 2.0**62, w * 2.0**63
    elif kind == "subnormal":  # products round among the subnormals, bf16 subnormals take part
        x, w = x * 2.0**-70, w * 2.0**-70
        x[:, ::5] = 1e-39
        w[:, ::5] = w[:, ::5].sign()
    elif kind == "special":
        for t, value in ((x, float("inf")), (w, float("nan"))):
            t[torch.rand(t.shape, generator=generator) < 0.2 / k] = value
        x[torch.rand(x.shape, generator=generator) < 0.2 / k] = float("-inf")
    elif kind == "signed_zeros":
        x, w = x.clamp(-0.3, 0.3) * (x.abs() > 0.3), w * (w.abs() > 1.0)
    return x.bfloat16(), w.bfloat16()


def _fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """fp32 a·b + c with one rounding: float64 holds the product of bf16 values; a sum rounded to odd there rounds correctly to fp32."""
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = np.asarray(product + addend)
    back = total - product
    error = (product - (total - back)) + (addend - back)
    inexact_even = np.isfinite(error) & (error != 0) & ((total.view(np.int64) & 1) == 0)
    odd = np.nextafter(total, np.copysign(np.inf, error))
    return np.where(inexact_even, odd, total).astype(F)


def _group(a: Floats, b: Floats) -> Floats:
    """[m, 16] and [n, 16]: the tree over 16 products for every pair of rows."""
    x, y = a[:, None, :], b[None, :, :]
    t = _fma(x[..., :8], y[..., :8], x[..., 8:] * y[..., 8:])
    t = t[..., :4] + t[..., 4:]
    t = t[..., :2] + t[..., 2:]
    return np.asarray(t[..., 0] + t[..., 1])


def _chain(a: Floats, b: Floats) -> Floats:
    """Planted: the products of a group one after another."""
    total = np.zeros((len(a), len(b)), F)
    for k in range(a.shape[1]):
        total = _fma(a[:, None, k], b[None, :, k], total)
    return total


def _leaf(a: Floats, b: Floats, width: int = 16, group: Callable[[Floats, Floats], Floats] = _group) -> Floats:
    acc = np.zeros((len(a), len(b)), F)
    for at in range(0, a.shape[1], width):
        x, y = (np.zeros((len(t), 16), F) for t in (a, b))
        count = min(width, a.shape[1] - at)
        x[:, :count], y[:, :count] = a[:, at : at + count], b[:, at : at + count]
        acc = acc + group(x, y)
    return acc


def _pairs(parts: list[Floats]) -> Floats:
    while len(parts) > 1:
        parts = [parts[i] + parts[i + 1] for i in range(0, len(parts), 2)]
    return parts[0]


def _ordered(
    x: torch.Tensor, w: torch.Tensor, splits: int, join: Callable[[list[Floats]], Floats] = _pairs, **planted: Any
) -> torch.Tensor:
    """x·wᵀ in the contract's order, fp32; a NaN is 0x7fc00000."""
    a, b = x.float().numpy(), w.float().numpy()
    edges = range(0, a.shape[1] + 1, a.shape[1] // splits)
    with np.errstate(all="ignore"):
        y = join([_leaf(a[:, i:j], b[:, i:j], **planted) for i, j in itertools.pairwise(edges)])
    return torch.from_numpy(np.where(np.isnan(y), np.array(0x7FC00000, np.uint32).view(F), y))


def _bits(t: torch.Tensor) -> torch.Tensor:
    return t.detach().contiguous().view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32)


def _differing(a: torch.Tensor, b: torch.Tensor) -> int:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    return int((_bits(a) != _bits(b)).sum())


# Both paths (up to 4 rows read w in place), both sides of 8, 16, 24, 128 and 256, depths past one packed and one in-place block.
SHAPES = (
    (1, 7, 1), (1, 16, 24), (2, 1000, 25), (3, 4104, 9), (4, 136, 50), (5, 40, 23), (8, 264, 48), (17, 72, 31), (33, 520, 7), (70, 96, 250),
    (130, 24, 33),
)  # fmt: skip


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("splits", [1, 2, 4, 8])
def test_every_element_is_summed_in_the_written_order(m: int, k: int, n: int, splits: int) -> None:
    k = -(-k // splits) * splits
    x, w = _operands(m, k, n)
    expected = _ordered(x, w, splits)
    assert not _differing(det_gemm(x, w, splits=splits, out_dtype=torch.float32), expected)
    assert not _differing(det_gemm(x, w, splits=splits), expected.bfloat16())


@pytest.mark.parametrize("m", [3, 21])
@pytest.mark.parametrize("kind", KINDS)
def test_order_holds_for_awkward_values(m: int, kind: str) -> None:
    x, w = _operands(m, 152, 40, kind)
    for splits in (1, 4):
        expected = _ordered(x, w, splits)
        seen = {
            "huge": expected.isinf().any() and expected.isfinite().any(),
            "subnormal": ((expected != 0) & (expected.abs() < 2.0**-126)).any(),
            "special": expected.isinf().any() and expected.isnan().any() and expected.isfinite().any(),
        }
        assert seen.get(kind, expected.isfinite().all())
        assert not _differing(det_gemm(x, w, splits=splits, out_dtype=torch.float32), expected)


def test_rows_from_1_to_70_are_the_same_rows() -> None:
    x, w = _operands(70, 88, 29)
    expected = _ordered(x, w, 2)
    for m in range(1, 71):
        assert not _differing(det_gemm(x[70 - m :], w, splits=2, out_dtype=torch.float32), expected[70 - m :])


def test_minus_zero_products_sum_to_plus_zero() -> None:
    x, w = torch.full((1, 32), -0.0).bfloat16(), torch.ones(3, 32).bfloat16()
    assert not _differing(det_gemm(x, w), torch.zeros(1, 3).bfloat16())


def _left_to_right(parts: list[Floats]) -> Floats:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize(
    ("splits", "planted"),
    [(1, {"width": 8}), (1, {"width": 15}), (1, {"group": _chain}), (8, {"join": _left_to_right}), (8, {"width": 8})],
    ids=["groups of 8", "misplaced group edge", "product by product", "leaves left to right", "groups of 8 in leaves"],
)
@pytest.mark.parametrize("m", [2, 20])
def test_planted_order_is_seen(m: int, splits: int, planted: dict[str, Any]) -> None:
    x, w = _operands(m, 256, 32)
    y = det_gemm(x, w, splits=splits, out_dtype=torch.float32)
    assert _differing(y, _ordered(x, w, splits, **planted)) > y.numel() // 20
    assert not _differing(y, _ordered(x, w, splits))


def test_splits_are_another_order() -> None:
    x, w = _operands(16, 512, 32)
    results = [det_gemm(x, w, splits=s, out_dtype=torch.float32) for s in (1, 2, 4, 8)]
    assert all(_differing(results[0], other) for other in results[1:])


@pytest.mark.parametrize("m", [1, 2, 4, 5, 40, 129])
@pytest.mark.parametrize("grad_splits", [1, 2, 8])
def test_input_gradient_is_summed_in_the_written_order(m: int, grad_splits: int) -> None:
    x, w = _operands(m, 57, 296)
    dy, _ = _operands(m, 296, 1)
    leaf = x.requires_grad_()
    det_gemm(leaf, w, grad_splits=grad_splits).backward(dy)
    assert leaf.grad is not None
    assert not _differing(leaf.grad, _ordered(dy, w.T.contiguous(), grad_splits).bfloat16())


def test_fp32_output_takes_its_gradient_as_bf16() -> None:
    x, w = _operands(6, 32, 48)
    dy, _ = _operands(6, 48, 1)
    grads = []
    for dtype in (torch.bfloat16, torch.float32):
        leaf = x.clone().requires_grad_()
        det_gemm(leaf, w, grad_splits=8, out_dtype=dtype).backward(dy.to(dtype))
        assert leaf.grad is not None
        grads.append(leaf.grad)
    assert not _differing(*grads)


@pytest.mark.parametrize("lengths", [(1,), (16,), WS1.lengths, (300, 5, 129)])
def test_weight_gradient_is_summed_in_token_order(lengths: tuple[int, ...]) -> None:
    x, _ = _operands(sum(lengths), 30, 1)
    dy, _ = _operands(sum(lengths), 21, 2)
    leaves = token_leaves(lengths)
    index, offsets = torch.tensor(leaves.index), torch.tensor(leaves.offsets)
    a, b = (torch.cat([t, torch.zeros(1, t.shape[1], dtype=t.dtype)])[index].float().numpy() for t in (dy, x))
    parts = [_leaf(a[i:j].T, b[i:j].T) for i, j in itertools.pairwise(leaves.offsets)]
    assert not _differing(det_gemm_weight_grad(x, dy, index, offsets), torch.from_numpy(_pairs(parts)))


def test_token_order_is_not_packed_order() -> None:
    x, _ = _operands(200, 30, 1)
    dy, _ = _operands(200, 21, 2)
    leaves = token_leaves((200,))
    whole = det_gemm_weight_grad(x, dy, torch.arange(200), torch.tensor([0, 200]))
    assert _differing(det_gemm_weight_grad(x, dy, torch.tensor(leaves.index), torch.tensor(leaves.offsets)), whole)


@pytest.mark.parametrize("splits", [1, 8])
def test_all_three_are_accurate(assert_accurate: Check, splits: int) -> None:
    x, w = _operands(WS1.packed, 320, 160)
    w = (w.float() / 320**0.5).bfloat16()
    dy = torch.randn(WS1.packed, 160, generator=torch.Generator().manual_seed(5)).bfloat16()
    leaf, exact = x.clone().requires_grad_(), x.float().requires_grad_()
    y, y_exact = det_gemm(leaf, w, splits=splits, grad_splits=splits), reference.det_gemm(exact, w)
    y.backward(dy)
    y_exact.backward(dy.float())
    assert leaf.grad is not None
    assert exact.grad is not None
    assert_accurate("det_gemm", FORWARD_ACCURACY, y.detach(), y_exact.detach())
    assert_accurate("det_gemm", GRADIENT_ACCURACY, leaf.grad, exact.grad)
    leaves = token_leaves(WS1.lengths)
    dw = det_gemm_weight_grad(x, dy, torch.tensor(leaves.index), torch.tensor(leaves.offsets))
    assert_accurate("det_gemm", GRADIENT_ACCURACY, dw, reference.det_gemm_weight_grad(x, dy))


@pytest.mark.parametrize("splits", [1, 8])
def test_rows_do_not_depend_on_batch_place_or_threads(assert_rows_invariant: Check, splits: int) -> None:
    x, w = _operands(WS1.packed, 96, 56)
    dy = torch.randn(WS1.packed, 56, generator=torch.Generator().manual_seed(6)).bfloat16()

    def both(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = det_gemm(leaf, w, splits=splits, grad_splits=splits)
        y.backward(dy)
        assert leaf.grad is not None
        return y.detach(), leaf.grad

    assert_rows_invariant(both, x, dy)


def test_columns_do_not_depend_on_their_neighbours() -> None:
    """A tensor-parallel shard of the rows of w gives the bytes that the whole gives."""
    x, w = _operands(7, 64, 200)
    for m in (1, 7):
        whole = det_gemm(x[:m], w)
        for first, last in ((0, 1), (3, 30), (24, 48), (25, 200), (199, 200)):
            assert not _differing(det_gemm(x[:m], w[first:last]), whole[:, first:last])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_partials_of_tensor_parallel_ranks_join_to_the_whole(ranks: int) -> None:
    """A rank of TP = t owns 8/t adjacent leaves, a whole subtree, and hands over one fp32 partial."""
    x, w = _operands(9, 320, 20)
    cuts = [slice(r * 320 // ranks, (r + 1) * 320 // ranks) for r in range(ranks)]
    parts = [det_gemm(x[:, c], w[:, c], splits=8 // ranks, out_dtype=torch.float32).numpy() for c in cuts]
    assert not _differing(torch.from_numpy(_pairs(parts)), det_gemm(x, w, splits=8, out_dtype=torch.float32))


def test_weight_gradient_keeps_its_bytes_in_every_layout(assert_leaves_invariant: Check) -> None:
    x, _ = _operands(WS1.packed, 72, 1)
    dy, _ = _operands(WS1.packed, 40, 2)
    assert_leaves_invariant(det_gemm_weight_grad, x, dy)


def test_thread_counts_split_large_products_alike() -> None:
    x, w = _operands(max(GEMM_ROWS), 64, 300)
    before = torch.get_num_threads()
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            results.append(det_gemm(x, w, splits=2))
        finally:
            torch.set_num_threads(before)
    assert not any(_differing(results[0], other) for other in results[1:])


@pytest.mark.parametrize(("m", "k", "n"), [(0, 16, 8), (3, 0, 8), (3, 16, 0)])
def test_empty_dimensions_give_empty_or_zero(m: int, k: int, n: int) -> None:
    y = det_gemm(torch.ones(m, k).bfloat16(), torch.ones(n, k).bfloat16())
    assert not _differing(y, torch.zeros(m, n).bfloat16())


def test_non_contiguous_operands_are_read_by_their_strides() -> None:
    x, w = _operands(12, 64, 32)
    assert not _differing(det_gemm(x.T.contiguous().T, w.T.contiguous().T), det_gemm(x, w))
    assert not _differing(det_gemm(x[::3], w[::2]), det_gemm(x, w)[::3, ::2])


def test_custom_operators_are_well_formed() -> None:
    x, w = _operands(5, 32, 16)
    for dtype in (torch.bfloat16, torch.float32):
        torch.library.opcheck(torch.ops.rlk.det_gemm.default, (x.clone().requires_grad_(), w, 2, 4, dtype))
    torch.library.opcheck(torch.ops.rlk.det_gemm_input_grad.default, (x[:, :16].contiguous(), w, 4))


def test_what_ran_is_read_back() -> None:
    x, w = _operands(4, 32, 16)
    reset_readback()
    det_gemm(x.requires_grad_(), w).sum().backward()
    det_gemm_weight_grad(x.detach(), torch.ones(4, 16).bfloat16(), torch.arange(4), torch.tensor([0, 4]))
    ran = {r.op: (r.backend, r.calls) for r in readback()}
    assert ran == dict.fromkeys(("det_gemm", "det_gemm.input_grad", "det_gemm.weight_grad"), ("cpu", 1))
    assert len({r.kernel_id for r in readback()}) == 1


X, W = torch.ones(4, 32).bfloat16(), torch.ones(24, 32).bfloat16()


@pytest.mark.parametrize(
    ("x", "w", "arguments", "words"),
    [
        (X.float(), W, {}, "bf16"),
        (X, W.half(), {}, "bf16"),
        (X[:, :16], W, {}, r"\[T, K\]"),
        (X[0], W, {}, r"\[T, K\]"),
        (X[None], W, {}, r"\[T, K\]"),
        (X, W, {"splits": 3}, "splits=3"),
        (X, W, {"splits": 0}, "splits=0"),
        (X, W, {"splits": 64}, "splits=64"),
        (X, W, {"grad_splits": 16}, "grad_splits=16"),
        (X, W, {"out_dtype": torch.float64}, "out_dtype"),
    ],
)
def test_wrong_operands_are_refused(x: torch.Tensor, w: torch.Tensor, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        det_gemm(x, w, **arguments)


@pytest.mark.parametrize(
    ("dy", "index", "offsets", "words"),
    [
        (torch.ones(4, 8), [0, 1], [0, 2], "bf16"),
        (torch.ones(3, 8).bfloat16(), [0, 1], [0, 2], r"\[T, N\]"),
        (torch.ones(4, 8).bfloat16(), [0, 4], [0, 2], "leaf_index"),
        (torch.ones(4, 8).bfloat16(), [0, -2], [0, 2], "leaf_index"),
        (torch.ones(4, 8).bfloat16(), [0, 1], [0, 3], "leaf_offsets"),
        (torch.ones(4, 8).bfloat16(), [0, 1], [1, 2], "leaf_offsets"),
        (torch.ones(4, 8).bfloat16(), [0, 1], [0, 2, 1, 2, 2], "leaf_offsets"),
        (torch.ones(4, 8).bfloat16(), [0, 1], [0, 1, 2, 2], "power-of-two"),
        (torch.ones(4, 8).bfloat16(), [0.0, 1.0], [0, 2], "int64"),
    ],
)
def test_wrong_leaves_are_refused(dy: torch.Tensor, index: list[int], offsets: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        det_gemm_weight_grad(X, dy, torch.tensor(index), torch.tensor(offsets))


def test_operands_on_two_devices_are_refused() -> None:
    index, offsets, dy = torch.tensor([0, 1]), torch.tensor([0, 2]), torch.ones(4, 8).bfloat16()
    with pytest.raises(ValueError, match=r"^det_gemm: w is on meta and x on cpu: move w to cpu$"):
        det_gemm(X, W.to("meta"))
    with pytest.raises(ValueError, match="det_gemm: dy is on meta"):
        det_gemm_weight_grad(X, dy.to("meta"), index, offsets)
    for leaves in ((index.to("meta"), offsets), (index, offsets.to("meta"))):
        with pytest.raises(ValueError, match=r"det_gemm: leaf_(index|offsets) is on meta and tokens on cpu"):
            det_gemm_weight_grad(X, dy, *leaves)


def test_backend_that_cannot_run_is_refused() -> None:
    for backend in ("triton", "vendor", "numpy"):
        with pytest.raises(BackendUnavailable, match=backend):
            det_gemm(X, W, backend=backend)
