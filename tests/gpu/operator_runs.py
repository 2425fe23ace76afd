"""On a card: repetitions, graphs, no waiting of the host, refusals, and a library's row sum that must be seen."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from report import Report

from rlk.contract.topology import token_leaves
from rlk.kernels._triton.launch import OPTIONS, platform
from rlk.kernels._triton.numerics import row_tree
from rlk.kernels.det_gemm import det_gemm, det_gemm_weight_grad
from rlk.kernels.embedding import embedding, embedding_weight_grad
from rlk.kernels.lm_head import lm_head
from rlk.kernels.pack import pack, unpack
from rlk.kernels.qk_norm import qk_norm, qk_norm_gamma_grad
from rlk.kernels.rms_norm import rms_norm, rms_norm_gamma_grad
from rlk.kernels.rope import rope, rope_table
from rlk.kernels.silu import silu
from rlk.kernels.swiglu import swiglu

Run = Callable[[], tuple[torch.Tensor, ...]]
REPETITIONS = 1000
LENGTHS = (100, 65, 11, 80)


def _both(run: Callable[..., torch.Tensor], x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    leaf = x.detach().requires_grad_()
    y = run(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, dy)[0]


def operators() -> dict[str, Run]:
    """Forward and gradients of every operator at widths of Qwen3-8B, 256 tokens."""
    torch.manual_seed(1)
    tokens = sum(LENGTHS)
    make = lambda *size: torch.randn(*size, device="cuda").bfloat16()
    leaves = token_leaves(LENGTHS)
    index, offsets = torch.tensor(leaves.index, device="cuda"), torch.tensor(leaves.offsets, device="cuda")
    x, dy, gamma = make(tokens, 4096), make(tokens, 4096), make(4096)
    heads, d_heads, head_gamma = make(tokens, 32, 128), make(tokens, 32, 128), make(128)
    table, positions = rope_table(128, 1e6, 4096).to("cuda"), torch.arange(tokens, device="cuda")
    gate_up, d_mid = make(tokens, 24576), make(tokens, 12288)
    qkv, o_proj, down = make(6144, 4096), make(4096, 4096), make(4096, 12288)
    d_qkv, head, d_head = make(tokens, 6144), make(8 * 1024, 4096), make(tokens, 8 * 1024).float()
    ids = torch.randint(1000, (tokens,), device="cuda")
    mask = torch.arange(4 * 100, device="cuda").reshape(4, 100) % 100 < torch.tensor(LENGTHS, device="cuda")[:, None]
    return {
        "rms_norm": lambda: (*_both(lambda v: rms_norm(v, gamma, 1e-6), x, dy), rms_norm_gamma_grad(x, dy, 1e-6, index, offsets)),
        "qk_norm": lambda: (
            *_both(lambda v: qk_norm(v, head_gamma, 1e-6), heads, d_heads),
            qk_norm_gamma_grad(heads, d_heads, 1e-6, index, offsets, 8),
        ),
        "rope": lambda: _both(lambda v: rope(v, positions, table), heads, d_heads),
        "silu": lambda: _both(silu, x, dy),
        "swiglu": lambda: _both(lambda v: swiglu(v, 8), gate_up, d_mid),
        "embedding": lambda: (embedding(ids, qkv, 1000), embedding_weight_grad(ids, x, index, offsets, 1024)),
        "pack": lambda: (pack(unpack(x, mask), mask), unpack(x, mask, 7)),
        "det_gemm qkv": lambda: (
            *_both(lambda v: det_gemm(v, qkv, splits=1, grad_splits=8), x, d_qkv),
            det_gemm_weight_grad(x, d_qkv, index, offsets),
        ),
        "det_gemm o_proj": lambda: _both(lambda v: det_gemm(v, o_proj, splits=8, grad_splits=1), x, dy),
        "det_gemm down_proj, one row": lambda: (det_gemm(d_mid[:1], down, splits=8), det_gemm(d_mid[:1], down)),
        "lm_head": lambda: _both(lambda v: lm_head(v, head), x, d_head),
    }


def repeats(report: Report) -> None:
    """One digest; the host never waits; a captured graph gives the same bytes."""
    for name, run in operators().items():
        expected = run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            waited = None
            run()
        except RuntimeError as error:
            waited = str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        report.holds("the host never waits", waited is None, **({} if waited is None else {"operator": name, "why": waited}))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        for tensor in captured:
            tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
        graph.replay()
        for actual, wanted in zip(captured, expected, strict=True):
            report.same("a replayed graph gives the same bytes", name, actual, wanted)
        report.repeats(f"{name}: repetitions", REPETITIONS, run)


def refusals(report: Report) -> None:
    """What must raise before a launch does; in a graph, where nothing can raise, rows of unknown ids and positions are NaN."""
    x = torch.randn(3, 2, 128, device="cuda").bfloat16()
    table, weight = rope_table(128, 1e6, 16).to("cuda"), torch.randn(16, 64, device="cuda").bfloat16()
    cases: dict[str, tuple[type[Exception], Callable[[], object]]] = {
        "position past the table": (IndexError, lambda: rope(x, torch.tensor([0, 16, 1], device="cuda"), table)),
        "negative id": (IndexError, lambda: embedding(torch.tensor([0, -1], device="cuda"), weight, 16)),
        "leaf of an unknown row": (
            ValueError,
            lambda: rms_norm_gamma_grad(x[:, 0], x[:, 0], 1e-6, torch.full((16,), 3, device="cuda"), torch.tensor([0, 16], device="cuda")),
        ),
        "mask of another batch": (ValueError, lambda: unpack(weight[:2], torch.ones(1, 3, dtype=torch.bool, device="cuda"))),
    }
    for name, (kind, call) in cases.items():
        try:
            call()
            raised: BaseException | None = None
        except Exception as error:
            raised = error
        report.holds("refusals", isinstance(raised, kind), case=name, raised=repr(raised)[:120])
    ids, positions = torch.tensor([1, 15, 2], device="cuda"), torch.tensor([1, 15, 2], device="cuda")
    embedding(ids, weight, 16), rope(x, positions, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, turned = embedding(ids, weight, 16), rope(x, positions, table)
    ids[1], positions[1] = 10**9, -(10**9)
    graph.replay()
    bad = [bool(v[1].isnan().all()) and bool(v[::2].isfinite().all()) for v in (rows, turned)]
    report.holds("an unknown id in a graph gives NaN", all(bad), found=bad)


@triton.jit
def _library_sum(x, y, WIDTH: tl.constexpr, ROWS: tl.constexpr, TREE: tl.constexpr):
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    value = tl.load(x + row[:, None] * WIDTH + column[None, :])
    tl.store(y + row, row_tree(value) if TREE else tl.sum(value, 1))


def planted_sum(report: Report) -> None:
    """tl.sum over a row changes with the tile, the row tree does not."""
    x = torch.randn(4096, 128, device="cuda")

    def total(rows: int, warps: int, tree: bool) -> torch.Tensor:
        y = torch.empty(len(x), device="cuda")
        options = {"num_warps": warps, **OPTIONS[platform()]}
        _library_sum[(len(x) // rows,)](x, y, WIDTH=128, ROWS=rows, TREE=tree, **options)
        return y

    shapes = ((1, 1), (1, 4), (16, 4), (64, 8), (128, 4))
    for rows, warps in shapes:
        report.same("row tree, every tile", f"{rows} rows {warps} warps", total(rows, warps, True), total(*shapes[0], True))
    report.differs("tl.sum, another tile", torch.stack([total(*shapes[0], False)] * 4), torch.stack([total(*s, False) for s in shapes[1:]]))
    report.differs("tl.sum for the row tree", total(16, 4, False), total(16, 4, True))
