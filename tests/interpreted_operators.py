"""Run by test_triton_aot.py under TRITON_INTERPRET=1: indices, masks and unwritten rows of the Triton operators, on a CPU.

Inputs are fp32 (the interpreter cannot add bf16) and lie inside buffers of NaN; fresh memory is NaN. Only where a value is read and
written is judged, within a loose tolerance: never bytes, and never an operator's arithmetic.
"""

from __future__ import annotations

import torch

from rlk.contract.topology import token_leaves
from rlk.kernels.det_gemm import triton as gemm
from rlk.kernels.det_gemm.triton_tiles import Tile
from rlk.kernels.embedding import triton as embedding
from rlk.kernels.pack import triton as pack
from rlk.kernels.rms_norm import triton as norm
from rlk.kernels.rope import triton as rope
from rlk.kernels.silu import triton as silu
from rlk.kernels.swiglu import triton as swiglu

EPS = 1e-6
LEAVES = token_leaves((11, 16, 3), canonical_cp=2)
INDEX, OFFSETS = torch.tensor(LEAVES.index), torch.tensor(LEAVES.offsets)


def inside_nan(*shape: int) -> torch.Tensor:
    """Random values whose neighbours in memory, on every side, are NaN."""
    around = torch.full([n + 2 for n in shape], float("nan"))
    inner = around[tuple(slice(1, n + 1) for n in shape)]
    inner.copy_(torch.randn(shape))
    return inner


def rows_inside_nan(rows: int, width: int) -> torch.Tensor:
    """Contiguous random rows with NaN before and after them."""
    return torch.cat((torch.full((8, width), float("nan")), torch.randn(rows, width), torch.full((8, width), float("nan"))))[8:-8]


def same(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-2) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance, msg=lambda text: f"{name}: {text}")
    print("ok", name)


def norms() -> None:
    for width in (5, 96):
        x, gamma, dy = rows_inside_nan(19, width), torch.randn(width), rows_inside_nan(19, width)
        leaf = x.clone().requires_grad_()
        y = torch.nn.functional.rms_norm(leaf, (width,), gamma, EPS)
        y.backward(dy)
        assert leaf.grad is not None
        same(f"rms_norm {width}", norm.normalise("rms_norm", x, gamma, EPS), y.detach())
        same(f"rms_norm backward {width}", norm.gradient("rms_norm", x, gamma, dy, EPS), leaf.grad)
    x, dy = torch.randn(30, 4, 40), torch.randn(30, 4, 40)
    terms = dy * torch.nn.functional.rms_norm(x, (40,), None, EPS)
    roots = norm.gamma_roots(x, dy, EPS, INDEX, OFFSETS, 4, 2, "qk_norm")
    same("gamma per shard", roots, torch.stack((terms[:, :2].sum((0, 1)), terms[:, 2:].sum((0, 1)))), 1e-1)
    heads = inside_nan(7, 200)[:, :160].unflatten(1, (4, 40))
    same("heads in place", norm.normalise("qk_norm", heads, torch.ones(40), EPS), torch.nn.functional.rms_norm(heads, (40,), None, EPS))


def products() -> None:
    tiles = (Tile(16, 32, 32, 4, 1), Tile(32, 16, 64, 4, 1), Tile(16, 16, 16, 4, 1, descriptors=True, park=2))
    for tile in tiles:
        for rows, depth, columns, splits in ((3, 72, 40, 1), (17, 64, 33, 4), (33, 128, 24, 8)):
            x, w = rows_inside_nan(rows, depth), rows_inside_nan(columns, depth)
            for whole in (True, False) if splits > 1 else (True,):
                out = torch.full((rows, columns), float("nan"))
                gemm.contract("product", x, w, False, splits, out, tile, whole)
                same(f"product {tile} {rows} {depth} {columns} {splits} {whole}", out, x @ w.T, 1e-3)
                v = rows_inside_nan(depth, columns)
                out = torch.full((rows, columns), float("nan"))
                gemm.contract("input_grad", x, v, True, splits, out, tile, whole)
                same(f"transposed {tile} {rows} {depth} {columns} {splits} {whole}", out, x @ v, 1e-3)
        x, dy = rows_inside_nan(30, 24), rows_inside_nan(30, 40)
        same(f"weight gradient {tile}", gemm.weight_grad("weight_grad", x, dy, INDEX, OFFSETS, tile), dy.T @ x, 1e-3)
    same("chosen tile", gemm.product("product", x, dy[:24, :24].contiguous(), 1, torch.float32), x @ dy[:24, :24].T, 1e-3)


def elementwise() -> None:
    x = rows_inside_nan(5, 300)
    same("silu", silu.forward(x), torch.nn.functional.silu(x))
    gate_up, dy = rows_inside_nan(6, 2 * 24), rows_inside_nan(6, 24)
    leaf = gate_up.clone().requires_grad_()
    gate, up = leaf.unflatten(-1, (3, 2, -1)).unbind(-2)
    y = (torch.nn.functional.silu(gate) * up).flatten(-2)
    y.backward(dy)
    assert leaf.grad is not None
    same("swiglu", swiglu.forward(gate_up, 3), y.detach())
    same("swiglu backward", swiglu.backward(gate_up, dy, 3), leaf.grad)
    angle = torch.arange(50)[:, None] * 0.1 ** torch.arange(3)
    table, positions = torch.stack((angle.cos(), angle.sin())), torch.tensor([0, 49, 7, 50])
    heads = inside_nan(4, 40)[:, :30].unflatten(1, (5, 6))
    turned = rope.rotate(heads, positions, table, inverse=False)
    cos, sin = table[:, positions[:3], None]
    first, second = heads[:3].chunk(2, -1)
    same("rope", turned[:3], torch.cat((first * cos - second * sin, second * cos + first * sin), -1))
    assert turned[3].isnan().all()
    same("rope back", rope.rotate(turned[:3], positions[:3], table, inverse=True), heads[:3])


def rows() -> None:
    ids, weight, dy = torch.tensor([3, 0, 3, 9, 3, *range(25)]) % 10, rows_inside_nan(10, 24), rows_inside_nan(30, 24)
    same("embedding", embedding.copy(ids, weight, 10), weight[ids])
    assert embedding.copy(torch.tensor([1, 10]), weight, 10)[1].isnan().all()
    same("embedding gradient", embedding.add_runs(ids, dy, INDEX, OFFSETS, 12), torch.zeros(12, 24).index_add_(0, ids, dy), 1e-3)
    mask = torch.rand(4, 6) < 0.5
    places = mask.flatten().nonzero()[:, 0]
    for kind in (torch.bfloat16, torch.float32, torch.bool):
        padded = torch.randn(24, 3).to(kind)
        packed = torch.empty(len(places), 3, dtype=kind)
        pack.copy_rows("pack", padded, packed, places, into=False)
        assert torch.equal(packed, padded[places])
        back = torch.zeros(24, 3, dtype=kind)
        pack.copy_rows("unpack", packed, back, places, into=True)
        assert torch.equal(back, padded * mask.flatten()[:, None])
    print("ok pack")


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    norm._ELEMENTS = 64  # the interpreter folds a row tree one element after the other
    for part in (norms, elementwise, rows, products):
        part()
    print("every index and mask is right")
