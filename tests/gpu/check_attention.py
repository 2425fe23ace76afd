"""Attention on a card: accuracy, bytes in every layout, planted faults and times.

    OUT=. PYTHONPATH=. python tests/gpu/check_attention.py [section ...]

Qwen3-8B's heads: 32 query, 8 KV, 128 wide. Writes $OUT/check_attention.json and exits 1 if a check failed. check_vendor_attention.py runs
the sections that do not look at Triton's tiles for the family vendor-one-split, which it names in $FAMILY.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from planting import planted_module
from report import Report, graphed, main
from torch.nn.functional import scaled_dot_product_attention as sdpa

from rlk.contract.numerics import HOPPER
from rlk.kernels.attention import attention, attention_with_lse, paged_attention, reference, triton_forward
from rlk.kernels.attention import triton as backend
from rlk.kernels.attention.context import Segment, attend, delta, key_gradient, query_gradient
from rlk.kernels.attention.triton import Tiles

HEADS, KV_HEADS, DIM = 32, 8, 128
SCALE = DIM**-0.5
VENDOR = os.environ.get("FAMILY", "fixed-split") == "vendor-one-split"
BACKEND = "vendor" if VENDOR else "triton"
FAMILIES = ((128, 0),) if VENDOR else ((HOPPER.kv_tile, HOPPER.kv_split), (128, 1024), (32, 64), (64, 0))
TILE, SPLIT = FAMILIES[0]
OTHER_HEADS = ((40, 8, 128), (4, 4, 64), (3, 1, 32)) if VENDOR else ((40, 8, 128), (12, 4, 96), (4, 4, 64), (3, 1, 32), (8, 2, 256))
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Inputs(NamedTuple):
    """q, d_out [T, 32, 128], k, v [T, 8, 128], bf16."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor

    def at(self, rows: torch.Tensor | slice) -> Inputs:
        return Inputs(*(x[rows] for x in self))


def make(rows: int, seed: int = 0, heads: int = HEADS, kv_heads: int = KV_HEADS, dim: int = DIM) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = lambda h: torch.randn(rows, h, dim, generator=generator, device="cuda").bfloat16()
    return Inputs(draw(heads), draw(kv_heads), draw(kv_heads), draw(heads))


def offsets(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device="cuda").cumsum(0)


def forward(b: Inputs, lengths: Sequence[int], tile: int = TILE, split: int = SPLIT) -> torch.Tensor:
    return attention(b.q, b.k, b.v, offsets(lengths), scale=b.q.shape[2] ** -0.5, kv_tile=tile, kv_split=split, backend=BACKEND)


def gradients(b: Inputs, lengths: Sequence[int], tile: int = TILE, split: int = SPLIT) -> Grads:
    leaves = [x.detach().clone().requires_grad_() for x in b[:3]]
    out = attention(*leaves, offsets(lengths), scale=b.q.shape[2] ** -0.5, kv_tile=tile, kv_split=split, backend=BACKEND)
    dq, dk, dv = torch.autograd.grad(out, leaves, b.d_out)
    return dq, dk, dv


class Pages:
    """One sequence's keys in shuffled pages. Slots beyond ``rows`` and all other pages are NaN; table tails are garbage."""

    def __init__(self, b: Inputs, page: int, rows: int | None = None) -> None:
        rows = len(b.k) if rows is None else rows
        count = -(-rows // page)
        shuffled = torch.randperm(count + 5, generator=torch.Generator().manual_seed(page))[:count]
        self.page, self.cache = page, torch.full((count + 5, KV_HEADS, page, 2 * DIM), torch.nan, device="cuda").bfloat16()
        self.table = torch.full((count + 2,), 2**31 - 1, dtype=torch.int32)
        self.table[:count] = shuffled
        self.table[-1] = -1
        self.table = self.table.cuda()
        position = torch.arange(rows, device="cuda")
        self.cache[self.table[position // page].long(), :, position % page] = torch.cat((b.k[:rows], b.v[:rows]), dim=-1)

    def step(self, spans: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows, page table, first rows and lengths of one step over rows first … end-1 for each (first, end), each its own sequence."""
        rows = torch.cat([torch.arange(*span) for span in spans]).cuda()
        table = torch.full((len(spans), len(self.table)), -7, dtype=torch.int32, device="cuda")
        ends = torch.tensor([end for _, end in spans], device="cuda")
        used = torch.arange(len(self.table), device="cuda") < ((ends + self.page - 1) // self.page)[:, None]
        table = torch.where(used, self.table, table)
        return rows, table, offsets([end - first for first, end in spans]), ends

    def run(self, q: torch.Tensor, spans: Sequence[tuple[int, int]], tile: int = TILE, split: int = SPLIT) -> torch.Tensor:
        """Rows first … end-1 for each (first, end) in one step; every span is a sequence of its own that shares these pages."""
        rows, table, starts, ends = self.step(spans)
        return paged_attention(q[rows], self.cache, table, starts, ends, scale=SCALE, kv_tile=tile, kv_split=split, backend=BACKEND)


def accuracy(report: Report) -> None:
    lengths = (300, 1, 1024, 777)
    b = make(sum(lengths))
    leaves = [x.float().requires_grad_() for x in b[:3]]
    expected = reference.attention(*leaves, offsets(lengths), scale=SCALE)
    wanted = torch.autograd.grad(expected, leaves, b.d_out.float())
    first, theirs = 0, []
    for n in lengths:
        q, k, v = (x[first : first + n].transpose(0, 1)[None].detach().requires_grad_() for x in b[:3])
        out = sdpa(q, k, v, is_causal=True, enable_gqa=True)
        grads = torch.autograd.grad(out, (q, k, v), b.d_out[first : first + n].transpose(0, 1)[None])
        theirs.append([x[0].transpose(0, 1).detach() for x in (out, *grads)])
        first += n
    others = [torch.cat(parts) for parts in zip(*theirs, strict=True)]
    for tile, split in FAMILIES:
        report.close(f"forward accuracy {tile}/{split}", forward(b, lengths, tile, split), expected.detach(), 5e-2, 2e-2, others[0])
    for name, actual, want, other in zip("qkv", gradients(b, lengths), wanted, others[1:], strict=True):
        report.close(f"gradient accuracy d{name}", actual, want, 5e-2, 2e-2, other)
    _, lse2 = attention_with_lse(b.q, b.k, b.v, offsets(lengths), scale=SCALE, kv_tile=TILE, kv_split=SPLIT, backend=BACKEND)
    report.holds("lse2 finite", bool(lse2.isfinite().all()))
    other = (TILE, SPLIT) if VENDOR else (64, 64)
    for heads, kv_heads, dim in OTHER_HEADS:
        b = make(200, 1, heads, kv_heads, dim)
        leaves = [x.float().requires_grad_() for x in b[:3]]
        expected = reference.attention(*leaves, offsets((150, 50)), scale=dim**-0.5)
        wanted = torch.autograd.grad(expected, leaves, b.d_out.float())
        name = f"other heads {heads}/{kv_heads}/{dim}"
        report.close(name, forward(b, (150, 50), *other), expected.detach(), 5e-2, 2e-2)
        for actual, want in zip(gradients(b, (150, 50), *other), wanted, strict=True):
            report.close(f"{name} gradients", actual, want, 1e-1, 2e-2)


def lengths_short(report: Report) -> None:
    """Lengths 1 … 300: training packed together, prefill alone, decode alone and in one batch, pages of 16 and 64."""
    b = make(300)
    rows = torch.cat([torch.arange(n) for n in range(1, 301)]).cuda()
    for tile, split in FAMILIES:
        name = f"{tile}/{split}"
        base = forward(b, (300,), tile, split)
        report.same("training = prefill, lengths 1–300", name, forward(b.at(rows), range(1, 301), tile, split), base[rows])
        for page in (16, 64):
            pages = Pages(b, page)
            spans = [(n - 1, n) for n in range(1, 301)]
            report.same("decode = prefill, lengths 1–300, one batch", f"{name} page {page}", pages.run(b.q, spans, tile, split), base)
            for n in range(1, 301):
                case = f"{name} page {page} length {n}"
                alone = Pages(b, page, n) if n % 50 == 3 else pages
                report.same("decode = prefill, lengths 1–300, alone", case, alone.run(b.q, [(n - 1, n)], tile, split), base[n - 1 : n])


def prefills_short(report: Report) -> None:
    """Each length 1 … 300 by itself."""
    b = make(300)
    for tile, split in FAMILIES:
        base = forward(b, (300,), tile, split)
        for n in range(1, 301):
            report.same("prefill of each length 1–300", f"{tile}/{split} {n}", forward(b.at(slice(0, n)), (n,), tile, split), base[:n])


def lengths_long(report: Report) -> None:
    """Each split edge ±1 and 20 lengths to 32k."""
    total = 32770
    b = make(total)
    lengths = sorted({int(300 * (32768 / 300) ** (i / 19)) + i % 3 for i in range(20)})
    for tile, split in FAMILIES[:2] + FAMILIES[3:]:
        name = f"{tile}/{split}"
        base = forward(b, (total,), tile, split)
        edges = [edge + d for edge in range(split or 1024, 32769, split or 1024) for d in (-1, 0, 1)]
        for page in (16, 64):
            pages = Pages(b, page)
            spans = [(n - 1, n) for n in sorted({*edges, *lengths})]
            wanted = base[[n - 1 for _, n in spans]]
            report.same(
                "decode = prefill, edges and 20 lengths, one batch", f"{name} page {page}", pages.run(b.q, spans, tile, split), wanted
            )
            for span in spans if page == 16 else [(n - 1, n) for n in lengths]:
                case = f"{name} page {page} length {span[1]}"
                report.same("decode = prefill, edges and 20 lengths, alone", case, pages.run(b.q, [span], tile, split), base[slice(*span)])
        for n in lengths:
            report.same("prefill of 20 lengths to 32k", f"{name} {n}", forward(b.at(slice(0, n)), (n,), tile, split), base[:n])
    rows = torch.cat([torch.arange(n) for n in lengths[:12]]).cuda()
    packed = forward(b.at(rows), lengths[:12])
    report.same("12 lengths packed", f"{TILE}/{SPLIT}", packed, forward(b, (total,))[rows])


def chunks(report: Report) -> None:
    """Chunked prefill over pages, whole tails of garbage, beside decode rows of other sequences."""
    b = make(2500)
    for tile, split in FAMILIES:
        base = forward(b, (2500,), tile, split)
        for page in (16, 64):
            for chunk in (7, 16, 64, 500, 1024):
                spans = [(at, min(at + chunk, 2500)) for at in range(0, 2500, chunk)]
                picked = spans if chunk > 7 else spans[::9]
                rows = torch.cat([torch.arange(*span) for span in picked]).cuda()
                case = f"{tile}/{split} page {page} chunk {chunk}"
                report.same("chunks together", case, Pages(b, page).run(b.q, picked, tile, split), base[rows])
                for span in picked[:: max(1, len(picked) // 4)]:
                    pages = Pages(b, page, span[1])
                    report.same("chunks alone", f"{case} {span}", pages.run(b.q, [span], tile, split), base[slice(*span)])
        mixed = [(2399, 2400), (0, 700), (1023, 1025), (99, 100), (1500, 2500), (0, 1)]
        rows = torch.cat([torch.arange(*span) for span in mixed]).cuda()
        report.same("decode and prefill in one step", f"{tile}/{split}", Pages(b, 16).run(b.q, mixed, tile, split), base[rows])
    if VENDOR:
        return
    pages = Pages(b, 16)
    pages.table[3] = 10**9
    broken = pages.run(b.q, [(99, 100), (39, 40)])
    report.holds("a visible page outside the cache gives NaN", bool(broken[0].isnan().all() and broken[1].isfinite().all()))


def tiles(report: Report) -> None:
    """Every block size, number of warps and way to join splits gives the same bytes."""
    lengths = (2100, 300, 17)
    b = make(sum(lengths))
    cu = offsets(lengths)
    keys, segments = backend.packed(b.k, b.v), backend.whole(cu)
    out, lse2 = attention_with_lse(b.q, b.k, b.v, cu, scale=SCALE, kv_tile=TILE, kv_split=SPLIT)
    for m, warps, stages, programs in (
        (16, 1, 1, 1), (16, 4, 2, 3), (16, 4, 3, 1), (32, 4, 2, 2), (64, 4, 2, 1), (64, 8, 1, 3), (128, 4, 1, 1), (128, 8, 2, 2),
        (128, 8, 3, 1),
    ):  # fmt: skip
        case = Tiles(m, TILE, warps, stages)
        got = backend.run_forward("attention", b.q, keys, segments, SCALE, TILE, SPLIT, True, tiles=case, programs=programs)
        report.same("forward tiles", f"{case} {programs}", got[0], out)
        report.same("forward tiles", f"{case} {programs} lse2", got[1], lse2)
    pages = Pages(b, 16, lengths[0])
    for spans in ([(n - 1, n) for n in range(1, lengths[0], 7)], [(n - 1, n) for n in (2100, 1, 700, 256, 257)]):
        rows, table, starts, ends = pages.step(spans)
        keys, segments = backend.paged(pages.cache, table, ends), backend.Segments(starts, len(spans), triton_forward.PAGED.value)
        for programs in (1, 5, 33, 300, 1000):
            got = backend.run_decode(b.q[rows], keys, segments, SCALE, TILE, SPLIT, programs=programs)
            report.same("decode by any number of programs", f"{len(spans)} sequences, {programs}", got, out[rows])


def tiles_backward(report: Report) -> None:
    """The same for the gradients."""
    lengths = (2100, 300, 17)
    b = make(sum(lengths))
    cu = offsets(lengths)
    segments = backend.whole(cu)
    out, lse2 = attention_with_lse(b.q, b.k, b.v, cu, scale=SCALE, kv_tile=TILE, kv_split=SPLIT)
    inputs = (b.q, b.k, b.v, b.d_out, lse2, delta(out, b.d_out))
    dq, (dk, dv) = backend.run_query_gradient(inputs, segments, SCALE), backend.run_key_gradient(inputs, segments, SCALE)
    for case in (Tiles(16, 16, 1, 1), Tiles(32, 128, 4, 1), Tiles(64, 64, 4, 2), Tiles(128, 32, 8, 2)):
        report.same("dq tiles", str(case), backend.run_query_gradient(inputs, segments, SCALE, case), dq)
    for case in (Tiles(16, 16, 1, 1), Tiles(64, 64, 8, 1), Tiles(128, 32, 4, 1), Tiles(32, 64, 4, 2), Tiles(16, 128, 8, 1)):
        for name, got, want in zip(("dk", "dv"), backend.run_key_gradient(inputs, segments, SCALE, case), (dk, dv), strict=True):
            report.same("dk, dv tiles", f"{name} {case}", got, want)


def layouts(report: Report) -> None:
    """Batch neighbours, permutation and strided views; then ranks that own parts of the queries or keys."""
    lengths = (11, 16, 13, 19, 129, 1500, 1, 1024)
    b = make(sum(lengths))
    cu = offsets(lengths).tolist()
    spans = [slice(cu[i], cu[i + 1]) for i in range(len(lengths))]
    out, grads = forward(b, lengths), gradients(b, lengths)
    for i, span in enumerate(spans):
        one = b.at(span)
        report.same("alone = among neighbours", f"forward {lengths[i]}", forward(one, (lengths[i],)), out[span])
        for name, got, want in zip("qkv", gradients(one, (lengths[i],)), grads, strict=True):
            report.same("alone = among neighbours", f"d{name} {lengths[i]}", got, want[span])
    order = (5, 2, 7, 0, 6, 3, 1, 4)
    rows = torch.cat([torch.arange(cu[i], cu[i + 1]) for i in order]).cuda()
    moved, moved_lengths = b.at(rows), [lengths[i] for i in order]
    report.same("permutation", "forward", forward(moved, moved_lengths), out[rows])
    for name, got, want in zip("qkv", gradients(moved, moved_lengths), grads, strict=True):
        report.same("permutation", f"d{name}", got, want[rows])
    joined = torch.cat((b.q, b.k, b.v), dim=1)
    views = Inputs(*joined.split((HEADS, KV_HEADS, KV_HEADS), dim=1), b.d_out)
    report.same("views of a packed projection", "forward", forward(views, lengths), out)
    total_lse2 = attention_with_lse(b.q, b.k, b.v, offsets(lengths), scale=SCALE, kv_tile=TILE, kv_split=SPLIT, backend=BACKEND)[1]
    sums = delta(out, b.d_out)
    for ranks in (2, 4, 8):
        for rank in range(ranks):
            segments: list[Segment] = []
            picked: list[int] = []
            for i, n in enumerate(lengths):
                width = -(-n // (2 * ranks))
                for part in (rank, 2 * ranks - 1 - rank):
                    first, end = min(part * width, n), min((part + 1) * width, n)
                    segments.append(Segment(len(picked), end - first, first, cu[i], n))
                    picked += range(cu[i] + first, cu[i] + end)
            own = torch.tensor(picked, device="cuda", dtype=torch.int64)
            case = f"rank {rank} of {ranks}"
            part, lse2 = attend(b.q[own], b.k, b.v, segments, scale=SCALE, kv_tile=TILE, kv_split=SPLIT, backend=BACKEND)
            report.same("context parallel", f"{case} forward", part, out[own])
            report.same("context parallel", f"{case} lse2", lse2, total_lse2[own])
            dq = query_gradient(b.q[own], b.k, b.v, b.d_out[own], lse2, sums[own], segments, scale=SCALE)
            dk, dv = key_gradient(b.q, b.k[own], b.v[own], b.d_out, total_lse2, sums, segments, scale=SCALE)
            for name, got, want in zip("qkv", (dq, dk, dv), grads, strict=True):
                report.same("context parallel", f"{case} d{name}", got, want[own])


def repetitions(report: Report) -> None:
    b, count = make(1500), 1000
    pages = Pages(b, 16)
    report.repeats("forward repeated", count, lambda: (forward(b, (1100, 400)),))
    report.repeats("backward repeated", count, lambda: gradients(b, (1100, 400)))
    report.repeats("decode repeated", count, lambda: (pages.run(b.q, [(1499, 1500), (1024, 1025), (9, 10)]),))
    cu = offsets((1100, 400))
    runs: dict[str, Callable[[], Any]] = {
        "prefill": lambda: (attention(*b[:3], cu, scale=SCALE, kv_tile=TILE, kv_split=SPLIT, backend=BACKEND),),
        "decode": lambda: (_decode(b, pages, ends),),
    }
    ends = torch.tensor([1500, 1025, 10], device="cuda")
    out, lse2 = attention_with_lse(*b[:3], cu, scale=SCALE, kv_tile=TILE, kv_split=SPLIT, backend=BACKEND)
    runs["backward"] = lambda: torch.ops.rlk.attention_backward(*b[:3], out, lse2, b.d_out, cu, SCALE)
    for name, run in runs.items():
        eager = [x.clone() for x in run()]
        replay, captured = graphed(run)
        for x in captured:
            x.zero_()
        replay()
        for x, y in zip(captured, eager, strict=True):
            report.same("graph = eager", name, x, y)
    report.same("the graphed decode is right", "decode", _decode(b, pages, ends), forward(b, (1500,))[ends - 1])


def _decode(b: Inputs, pages: Pages, ends: torch.Tensor) -> torch.Tensor:
    """A decode step that reads nothing on the host."""
    starts, table = torch.arange(len(ends) + 1, device="cuda"), pages.table.repeat(len(ends), 1)
    return paged_attention(b.q[ends - 1], pages.cache, table, starts, ends, scale=SCALE, kv_tile=TILE, kv_split=SPLIT, backend=BACKEND)


def planted(report: Report) -> None:
    """Faults that the byte comparisons above must see."""
    b = make(2500)
    keys, segments = backend.packed(b.k, b.v), backend.whole(offsets((2500,)))
    right, kernel = forward(b, (2500,)), backend.attention_forward

    def run(m: int, warps: int) -> torch.Tensor:
        tile = Tiles(m, TILE, warps, 2)  # scale 1: a row's probabilities span so many powers of two that their sum is rounded
        return backend.run_forward("attention", b.q, keys, segments, 1.0, TILE, SPLIT, True, tile, 1)[0]

    sums = "    s = tl.dot(p, ones, s * alpha[:, None])\n"
    pairs = (((16, 4), (128, 8)), ((32, 8), (64, 4)))
    for one, two in pairs:
        report.same("control: row sums by tl.dot", f"{one} {two}", run(*one), run(*two))
    try:
        fault = "    s = s * alpha[:, None] + tl.sum(p.to(tl.float32), 1)[:, None]\n"
        backend.attention_forward = planted_module(triton_forward, (sums, fault)).attention_forward
        for one, two in pairs:
            report.differs(f"row sums by tl.sum, (tile, warps) {one} and {two}", run(*one), run(*two))
    finally:
        backend.attention_forward = kernel
    pages = Pages(b, 16)
    spans = [(n - 1, n) for n in range(1000, 2500, 37)]
    wanted = right[[n - 1 for _, n in spans]]
    report.same("control of the next", "decode", pages.run(b.q, spans), wanted)
    report.differs("decode with automatic splits", pages.run(b.q, spans, TILE, 256), wanted)
    report.differs("decode with another tile", pages.run(b.q, spans, 128, SPLIT), wanted)


def _time_training(report: Report, n: int, batch: int) -> None:
    b, cu = make(n * batch), offsets((n,) * batch)
    q, k, v, do = (x.view(batch, n, -1, DIM).transpose(1, 2).detach().requires_grad_() for x in b)
    gflop = 4 * HEADS * DIM * batch * n * n / 2 / 1e9
    with torch.no_grad():
        arms: dict[str, Callable[[], Any]] = {"sdpa": graphed(lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True))[0]}
        for tile, split in ((64, 1024), (128, 1024), (64, 0)):
            run = partial(attention, b.q, b.k, b.v, cu, scale=SCALE, kv_tile=tile, kv_split=split)
            arms[f"rlk {tile}/{split}"] = graphed(run)[0]
        report.timed(f"prefill {n} x {batch}", arms, gflop=gflop)
    if n > 8192:
        return
    theirs = sdpa(q, k, v, is_causal=True, enable_gqa=True)
    out, lse2 = attention_with_lse(b.q, b.k, b.v, cu, scale=SCALE, kv_tile=TILE, kv_split=SPLIT)
    inputs, segments = (b.q, b.k, b.v, b.d_out, lse2, delta(out, b.d_out)), backend.whole(cu)
    arms = {
        "sdpa": lambda: torch.autograd.grad(theirs, (q, k, v), do, retain_graph=True),
        "rlk": graphed(lambda: torch.ops.rlk.attention_backward(b.q, b.k, b.v, out, lse2, b.d_out, cu, SCALE))[0],
        "rlk delta": graphed(lambda: delta(out, b.d_out))[0],
        "rlk dq": graphed(lambda: backend.run_query_gradient(inputs, segments, SCALE))[0],
        "rlk dk dv": graphed(lambda: backend.run_key_gradient(inputs, segments, SCALE))[0],
    }
    report.timed(f"backward {n} x {batch}", arms, gflop=2.5 * gflop)


def _time_forward_tiles(report: Report, n: int, batch: int) -> None:
    b = make(n * batch)
    keys, segments = backend.packed(b.k, b.v), backend.whole(offsets((n,) * batch))
    arms: dict[str, Callable[[], Any]] = {}
    for tile in (
        Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 4), Tiles(128, 64, 4, 3), Tiles(128, 128, 8, 2), Tiles(64, 128, 4, 1),
        Tiles(64, 32, 4, 3),
    ):  # fmt: skip
        run = partial(backend.run_forward, "attention", b.q, keys, segments, SCALE, tile.n, 1024, True, tile, 1)
        arms[str(tuple(tile))] = graphed(run)[0]
    report.timed(f"prefill tiles {n} x {batch}", arms)


def _time_decode(report: Report, n: int, batch: int) -> None:
    cache = torch.randn(batch * n // 16, KV_HEADS, 16, 2 * DIM, device="cuda").bfloat16()
    table = torch.arange(len(cache), dtype=torch.int32, device="cuda").view(batch, -1)
    keys = cache.view(batch, -1, KV_HEADS, 16, 2 * DIM).transpose(1, 2).flatten(2, 3)
    k, v = keys[..., :DIM].contiguous(), keys[..., DIM:].contiguous()
    q, starts, ends = make(batch).q, torch.arange(batch + 1, device="cuda"), torch.full((batch,), n, device="cuda")
    arms = {"sdpa": graphed(lambda: sdpa(q[:, :, None], k, v, enable_gqa=True))[0]}
    for tile, split in ((64, 1024), (128, 1024), (128, 2048), (64, 0)):
        run = partial(paged_attention, q, cache, table, starts, ends, scale=SCALE, kv_tile=tile, kv_split=split)
        arms[f"rlk {tile}/{split}"] = graphed(run)[0]
    report.timed(f"decode {batch} x {n}", arms, megabytes=4 * n * batch * KV_HEADS * DIM / 1e6)


def times(report: Report) -> None:
    b, cu = make(64), offsets((64,))
    table, starts = torch.zeros(64, 4, dtype=torch.int32, device="cuda"), torch.arange(65, device="cuda")
    cache = torch.zeros(1, KV_HEADS, 16, 2 * DIM, device="cuda").bfloat16()
    report.host_time("host time of a call", {
        "attention": lambda: attention(b.q, b.k, b.v, cu, scale=SCALE, kv_tile=64, kv_split=1024),
        "paged_attention": lambda: paged_attention(b.q, cache, table, starts, starts[1:], scale=SCALE, kv_tile=64, kv_split=1024),
        "sdpa": lambda: sdpa(b.q.transpose(0, 1)[None], b.k.transpose(0, 1)[None], b.v.transpose(0, 1)[None], enable_gqa=True),
    })  # fmt: skip
    for n, batch in ((512, 8), (2048, 4), (8192, 1), (32768, 1)):
        _time_training(report, n, batch)
    _time_forward_tiles(report, 2048, 4)
    for n, batch in ((1024, 32), (8192, 32), (8192, 4), (8192, 1), (32768, 1)):
        _time_decode(report, n, batch)


SECTIONS = {
    run.__name__: run
    for run in (accuracy, tiles, tiles_backward, lengths_short, prefills_short, lengths_long, chunks, layouts, planted, repetitions, times)
}

if __name__ == "__main__":
    main("check_attention", SECTIONS)
