"""Times of attention on a card beside FlashAttention 3 (where vLLM is installed) and torch's SDPA, interleaved and with a cold cache:

    PYTHONPATH=. OUT=. python3 benchmarks/operators/bench_attention.py [decode|prefill|backward|once ...]

Qwen3-8B's heads. Bytes come first: a decode step is compared with the prefill of the same tokens, prefill and gradients with the kernels
that every card runs, and nothing is timed where they differ. A decode step runs as many layers as fill the second-level cache several
times, each with pages of its own, in one graph; its time is that of all of them. once: every kernel once, for a profiler. Writes
$OUT/bench_attention.json after every section but that.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "gpu"))

from report import Report, environment, graphed

from rlk.kernels.attention import attention_with_lse, paged_attention
from rlk.kernels.attention import triton as backend
from rlk.kernels.attention.vendor_library import LIBRARY

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
SCALE = DIM**-0.5
SIZES = ((64, 256), (64, 512))
"""kv_tile and kv_split."""
LONGEST = 4096
"""Tokens that the page table has room for, at least."""


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: torch.Tensor, rows: int, keys: int, splits: int,
    lengths: torch.Tensor | None = None, table: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """FlashAttention 3 over pages, or over packed rows, with ``splits`` splits, 0 for its own choice; starts, lengths, table: int32."""
    return LIBRARY._function(
        q, k, v, None, None, None, None, starts, starts if table is None else None, None, None, lengths, rows, keys, table, *(None,) * 8,
        SCALE, True, -1, -1, 0.0, True, None, splits, None, 0, None, 1, 0, None,
    )  # fmt: skip


def bytes_agree(report: Report, tile: int, split: int) -> bool:
    """Whether decode steps of 300, 1000 and 3000 tokens have the bytes of a prefill of 3000."""
    rows = 3000
    q, k, v = draw(rows, HEADS, DIM), draw(rows, KV_HEADS, DIM), draw(rows, KV_HEADS, DIM)
    sizes: dict[str, Any] = {"scale": SCALE, "kv_tile": tile, "kv_split": split}
    out, _ = attention_with_lse(q, k, v, torch.tensor([0, rows], device="cuda"), **sizes)
    pages = -(-rows // PAGE)
    cache = torch.zeros(pages * PAGE, KV_HEADS, 2 * DIM, device="cuda").bfloat16()
    cache[:rows] = torch.cat((k, v), dim=-1)
    cache = cache.view(pages, PAGE, KV_HEADS, 2 * DIM).transpose(1, 2)
    ends = torch.tensor([300, 1000, 3000], device="cuda")
    table = torch.arange(pages, dtype=torch.int32, device="cuda").expand(3, pages)
    got = paged_attention(q[ends - 1], cache, table, torch.arange(4, device="cuda"), ends, **sizes)
    report.same("decode = prefill", f"{tile}/{split}", got, out[ends - 1])
    return not report.failed


def decode(report: Report) -> None:
    sizes = [size for size in SIZES if bytes_agree(report, *size)]
    for batch, keys in (
        (1, 1024), (1, 8192), (1, 32768), (32, 1024), (32, 8192), (32, 32768), (1, 300), (16, 300), (16, 1024), (16, 3072), (128, 1024),
        (128, 3072),
    ):  # fmt: skip
        _decode(report, f"{batch} x {keys}", [keys] * batch, sizes)
    uneven = [round(300 * (4096 / 300) ** (i / 31)) for i in range(32)]
    _decode(report, f"32 x {uneven[0]} to {uneven[-1]}", uneven, sizes)


def _decode(report: Report, name: str, lengths: list[int], sizes: Sequence[tuple[int, int]]) -> None:
    batch, keys = len(lengths), max(lengths)
    layers = max(2, min(24, -(-160_000_000 // (sum(lengths) * 4096))))
    pages = -(-keys // PAGE)
    cache = torch.randn(layers * batch * pages, KV_HEADS, PAGE, 2 * DIM, device="cuda", dtype=torch.bfloat16)
    tables = torch.zeros(layers, batch, max(pages, LONGEST // PAGE), dtype=torch.int32, device="cuda")
    tables[:, :, :pages] = torch.randperm(len(cache), device="cuda").view(layers, batch, pages)
    q, starts, ends = draw(batch, HEADS, DIM), torch.arange(batch + 1, device="cuda"), torch.tensor(lengths, device="cuda")
    arms: dict[str, Callable[[torch.Tensor], Any]] = {}
    for tile, split in sizes:
        arms[f"{tile}/{split}"] = lambda table, tile=tile, split=split: paged_attention(
            q, cache, table, starts, ends, scale=SCALE, kv_tile=tile, kv_split=split
        )
    if LIBRARY.available:
        k, v = (x.transpose(1, 2).contiguous() for x in cache.split(DIM, dim=3))
        few, used, room = starts.int(), ends.int(), tables.shape[2] * PAGE
        for library, splits in (("FlashAttention 3", 0), ("FlashAttention 3, one split", 1)):
            arms[library] = lambda table, splits=splits: flash(q, k, v, few, 1, room, splits, used, table)
    replays = {arm: graphed(lambda run=run: [run(table) for table in tables])[0] for arm, run in arms.items()}
    report.timed(f"decode {name}, {layers} layers", replays)


def _same_as_every_card(report: Report) -> bool:
    """Whether prefill and gradients of packed sequences have the bytes of the kernels that every card runs."""
    lengths = torch.tensor([0, 1, 18, 318, 2418], device="cuda")
    q, k, v, d_out = (draw(2418, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS))
    keys, segments = backend.packed(k, v), backend.whole(lengths)
    for tile, split in SIZES:
        out, lse2 = backend.run_forward("attention", q, keys, segments, SCALE, tile, split, True)
        wanted = backend.run_forward("attention", q, keys, segments, SCALE, tile, split, True, backend.forward_tiles(4096, tile, DIM))
        report.same("prefill = every card's", f"{tile}/{split}", out, wanted[0])
        report.same("prefill = every card's", f"{tile}/{split} lse2", lse2, wanted[1])
    inputs = (q, k, v, d_out, *backend.run_sums(out, d_out, lse2))
    dq, (dk, dv) = backend.run_query_gradient(inputs, segments, SCALE), backend.run_key_gradient(inputs, segments, SCALE)
    report.same(
        "gradients = every card's", "dq", dq, backend.run_query_gradient(inputs, segments, SCALE, backend.query_gradient_tiles(DIM))
    )
    wanted = backend.run_key_gradient(inputs, segments, SCALE, backend.key_gradient_tiles(DIM))
    for name, got, want in zip(("dk", "dv"), (dk, dv), wanted, strict=True):
        report.same("gradients = every card's", name, got, want)
    return not report.failed


def _packed(rows: int, batch: int) -> tuple[torch.Tensor, ...]:
    offsets = torch.arange(0, (batch + 1) * rows, rows, device="cuda")
    return *(draw(rows * batch, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)), offsets


def prefill(report: Report) -> None:
    if not _same_as_every_card(report):
        return
    for rows, batch in ((512, 8), (2048, 4), (8192, 1), (32768, 1)):
        _prefill(report, rows, batch)


def _prefill(report: Report, rows: int, batch: int) -> None:
    q, k, v, _, offsets = _packed(rows, batch)
    starts = offsets.int()
    each = [x.view(batch, rows, -1, DIM).transpose(1, 2) for x in (q, k, v)]
    arms: dict[str, Callable[[], Any]] = {"sdpa": lambda: sdpa(*each, is_causal=True, enable_gqa=True)}
    if LIBRARY.available:
        arms["FlashAttention 3, one split"] = lambda: flash(q, k, v, starts, rows, rows, 1)
    for tile, split in SIZES:
        arms[f"{tile}/{split}"] = partial(attention_with_lse, q, k, v, offsets, scale=SCALE, kv_tile=tile, kv_split=split)
    with torch.no_grad():
        report.timed(f"prefill {rows} x {batch}", {name: graphed(run)[0] for name, run in arms.items()}, repetitions=9)


def backward(report: Report) -> None:
    if not _same_as_every_card(report):
        return
    for rows, batch in ((512, 8), (2048, 4), (8192, 1)):
        _backward(report, rows, batch)


def _backward(report: Report, rows: int, batch: int) -> None:
    q, k, v, d_out, offsets = _packed(rows, batch)
    each = [x.view(batch, rows, -1, DIM).transpose(1, 2).detach().requires_grad_() for x in (q, k, v)]
    theirs = sdpa(*each, is_causal=True, enable_gqa=True)
    seed = d_out.view(batch, rows, -1, DIM).transpose(1, 2)
    out, lse2 = attention_with_lse(q, k, v, offsets, scale=SCALE, kv_tile=64, kv_split=256)
    inputs, segments = (q, k, v, d_out, *backend.run_sums(out, d_out, lse2)), backend.whole(offsets)
    arms = {
        "sdpa": partial(torch.autograd.grad, theirs, each, seed, retain_graph=True),
        "rlk": graphed(partial(backend.run_backward, q, k, v, out, lse2, d_out, offsets, SCALE))[0],
        "rlk dq": graphed(partial(backend.run_query_gradient, inputs, segments, SCALE))[0],
        "rlk dk dv": graphed(partial(backend.run_key_gradient, inputs, segments, SCALE))[0],
    }
    report.timed(f"backward {rows} x {batch}", arms, repetitions=9)


def once(_: Report) -> None:
    """Every kernel once at 8192 tokens: prefill, both gradients, a decode step of 32 sequences."""
    q, k, v, d_out, offsets = _packed(8192, 1)
    out, lse2 = attention_with_lse(q, k, v, offsets, scale=SCALE, kv_tile=64, kv_split=256)
    backend.run_backward(q, k, v, out, lse2, d_out, offsets, SCALE)
    cache = torch.zeros(32 * 512, KV_HEADS, PAGE, 2 * DIM, device="cuda", dtype=torch.bfloat16)
    table = torch.arange(32 * 512, dtype=torch.int32, device="cuda").view(32, 512)
    starts, ends = torch.arange(33, device="cuda"), torch.full((32,), 8192, device="cuda")
    paged_attention(draw(32, HEADS, DIM), cache, table, starts, ends, scale=SCALE, kv_tile=64, kv_split=256)


SECTIONS = {"prefill": prefill, "backward": backward, "decode": decode}

if __name__ == "__main__":
    found, path = Report(), Path(os.environ.get("OUT", ".")) / "bench_attention.json"
    for name in sys.argv[1:] or SECTIONS:
        found.run(name, {**SECTIONS, "once": once}[name])
        if name != "once":
            path.write_text(json.dumps({**environment(), **found.facts()}, indent=1) + "\n")
    sys.exit(1 if found.failed else 0)
