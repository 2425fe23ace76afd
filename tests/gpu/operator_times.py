"""On a card: times against torch's defaults, and of candidate tiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from operator_products import PLAIN_CANDIDATES, SPLIT_CANDIDATES, TOKEN_TILES, random, run
from report import Report

from rlk.contract.models import QWEN3_8B
from rlk.contract.topology import token_leaves
from rlk.kernels.det_gemm import triton as gemm
from rlk.kernels.det_gemm.triton_tiles import Tile
from rlk.kernels.det_gemm.vendor import split_k_off
from rlk.kernels.embedding.triton import copy
from rlk.kernels.rms_norm import triton as norm
from rlk.kernels.rms_norm.triton import gamma_grad, gradient, normalise
from rlk.kernels.rope import rope_table
from rlk.kernels.rope.triton import rotate
from rlk.kernels.swiglu.triton import backward, forward

FEW = (1, 16, 64, 128, 256)
MANY = (512, 2048, 4096)


def timed(report: Report, name: str, arms: dict[str, Callable[[], Any]], repetitions: int = 9) -> None:
    """report.timed over captured graphs, so that the host's launches are no part of the time."""
    graphs = {arm: _captured(call) for arm, call in arms.items()}
    report.timed(name, {arm: graph.replay for arm, graph in graphs.items()}, repetitions)


def everything(report: Report) -> None:
    """All times; sets no flag that a user of torch would not find set."""
    torch.manual_seed(0)
    products(report)
    rows(report)
    tiles(report)


def _captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def products(report: Report) -> None:
    """Forward passes in their own order against default F.linear."""
    for layer in QWEN3_8B.gemms():
        splits = 8 if layer.name in ("o_proj", "down_proj") else 1
        dtype = torch.float32 if layer.name == "lm_head" else torch.bfloat16
        w = random(layer.n, layer.k)
        for rows in (*FEW, *(MANY if layer.name != "lm_head" else (2048,))):
            x = random(rows, layer.k)
            arms = {"torch": partial(torch.nn.functional.linear, x, w), "rlk": partial(gemm.product, "det_gemm", x, w, splits, dtype)}
            if splits > 1:
                arms["rlk plain"] = partial(gemm.product, "det_gemm", x, w, 1, dtype)
            timed(report, f"{layer.name} M{rows}", arms)
    for layer in QWEN3_8B.gemms()[:-1]:
        splits = 1 if layer.name in ("o_proj", "down_proj") else 8
        w, dy, x = random(layer.n, layer.k), random(4096, layer.n), random(4096, layer.k)
        leaves = token_leaves((1024, 1024, 1024, 1024))
        index, offsets = torch.tensor(leaves.index, device="cuda"), torch.tensor(leaves.offsets, device="cuda")
        arms = {"torch": partial(torch.mm, dy, w), "rlk": partial(gemm.input_grad, "det_gemm.input_grad", dy, w, splits)}
        timed(report, f"{layer.name} input gradient M4096", arms, repetitions=7)
        arms = {"torch": partial(torch.mm, dy.T, x), "rlk": partial(gemm.weight_grad, "det_gemm.weight_grad", x, dy, index, offsets)}
        timed(report, f"{layer.name} weight gradient T4096", arms, repetitions=7)


def rows(report: Report) -> None:
    """Operators that move bytes, against torch's."""
    shape_of = norm._shape
    for tokens in (16, 4096):
        x, dy, gamma = random(tokens, 4096), random(tokens, 4096), random(4096)
        theirs = partial(torch.nn.functional.rms_norm, x, (4096,), gamma, 1e-6)
        timed(report, f"rms_norm {tokens}", {"torch": theirs, "rlk": partial(normalise, "rms_norm", x, gamma, 1e-6)})
        for warps in (1, 2, 4):
            shape = {"WIDTH": 4096, "ROWS": 1, "BLOCK": 4096, "warps": warps}
            norm._shape = lambda width, shape=shape: shape
            timed(report, f"rms_norm {tokens} {warps} warps", {"y": partial(normalise, "rms_norm", x, gamma, 1e-6)})
        norm._shape = shape_of
        timed(report, f"rms_norm backward {tokens}", {"rlk": partial(gradient, "rms_norm", x, gamma, dy, 1e-6)})
        heads, head_gamma = random(tokens, 32, 128), random(128)
        theirs = partial(torch.nn.functional.rms_norm, heads, (128,), head_gamma, 1e-6)
        timed(report, f"qk_norm {tokens}", {"torch": theirs, "rlk": partial(normalise, "qk_norm", heads, head_gamma, 1e-6)})
        table, positions = rope_table(128, 1e6, 8192).to("cuda"), torch.arange(tokens, device="cuda")
        timed(report, f"rope {tokens}", {"copy": heads.clone, "rlk": partial(rotate, heads, positions, table, False)})
        gate_up, d_mid = random(tokens, 24576), random(tokens, 12288)
        theirs = lambda g=gate_up: torch.nn.functional.silu(g[:, :12288]) * g[:, 12288:]
        timed(report, f"swiglu {tokens}", {"torch": theirs, "rlk": partial(forward, gate_up, 8)})
        timed(report, f"swiglu backward {tokens}", {"rlk": partial(backward, gate_up, d_mid, 8)})
        weight, ids = random(152576, 4096), torch.randint(151936, (tokens,), device="cuda")
        theirs = partial(torch.nn.functional.embedding, ids, weight)
        timed(report, f"embedding {tokens}", {"torch": theirs, "rlk": partial(copy, ids, weight, 151936)})
    leaves = token_leaves((1024, 1024, 1024, 1024))
    index, offsets = torch.tensor(leaves.index, device="cuda"), torch.tensor(leaves.offsets, device="cuda")
    timed(report, "rms_norm gamma gradient 4096", {"rlk": partial(gamma_grad, x, dy, 1e-6, index, offsets)})


def tiles(report: Report) -> None:
    """Candidate tiles of one layer each, so that a table can be chosen."""
    for n, k in ((6144, 4096), (4096, 12288)):
        w = random(n, k)
        for rows, candidates in PLAIN_CANDIDATES.items():
            x = random(rows, k)
            arms = {_short(tile, True): partial(run, x, w, False, 1, tile, True, x.dtype) for tile in candidates}
            timed(report, f"plain {rows}x{k}x{n}", {"torch": partial(torch.nn.functional.linear, x, w), **arms}, repetitions=7)
    for n, k in ((4096, 4096), (4096, 12288)):
        w = random(n, k)
        for rows, options in SPLIT_CANDIDATES.items():
            x = random(rows, k)
            arms = {_short(tile, whole): partial(run, x, w, False, 8, tile, whole, x.dtype) for tile, whole in options}
            timed(report, f"split {rows}x{k}x{n}", {"torch": partial(torch.nn.functional.linear, x, w), **arms}, repetitions=7)
    leaves = token_leaves((1024, 1024, 1024, 1024))
    index, offsets = torch.tensor(leaves.index, device="cuda"), torch.tensor(leaves.offsets, device="cuda")
    x, dy = random(4096, 4096), random(4096, 6144)
    gathered = partial(gemm._gathered, dy, index, offsets, 64)
    timed(report, "gather 4096x6144", {"copy": dy.clone, "rlk": gathered})
    arms = {_short(t, True): partial(gemm.weight_grad, "det_gemm.weight_grad", x, dy, index, offsets, t) for t in TOKEN_TILES}
    timed(report, "weight gradient 6144x4096", {"torch": partial(torch.mm, dy.T, x), **arms}, repetitions=7)
    x, w = random(4096, 12288), random(4096, 12288)
    with split_k_off():
        timed(report, "down_proj M4096, split-K off", {"torch": partial(torch.nn.functional.linear, x, w)}, repetitions=7)


def _short(tile: Tile, whole: bool) -> str:
    flags = (
        f"{' tma' if tile.descriptors else ''}{f' park{tile.park}' if tile.park else ''}{f' x{tile.resident}' if tile.resident > 1 else ''}"
    )
    return f"{tile.rows}x{tile.columns}x{tile.depth} w{tile.warps} s{tile.stages}{flags}{'' if whole else ' parts'}"
