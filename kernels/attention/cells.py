"""Arguments of attention at the dimensions of the contract.

A launch of whole samples is packed attention, every gap a sequence of its own. A launch of pieces is paged attention over the samples'
keys; its gradients are those of a rank that owns the pieces as queries and as keys.
"""

from __future__ import annotations

from typing import Any

import torch

from rlk.contract.numerics import DEFAULT
from rlk.contract.operators import OperatorShape
from rlk.kernels.attention import attention, attention_with_lse, paged_attention, reference
from rlk.kernels.attention.context import Segment, delta, key_gradient, query_gradient
from rlk.kernels.case import Draw, Launch, OperatorCase, Tensors, differentiate, exact, leaf

GAP = 64  # rows of the longest sequence that fills a gap
NO_PAGE = 2**31 - 1  # what a page table holds beyond a sequence's last page


def build(shape: OperatorShape, backend: str) -> OperatorCase:
    """sizes: q_heads, kv_heads, dim, page."""
    draw, sizes, batch = Draw(shape, backend), shape.sizes, shape.batch
    q_heads, kv_heads, dim = sizes["q_heads"], sizes["kv_heads"], sizes["dim"]
    scale = dim**-0.5
    kv_split = 0 if backend == "vendor" else DEFAULT.kv_split  # the vendor's family has one split
    tiles: dict[str, Any] = {"scale": scale, "kv_tile": DEFAULT.kv_tile, "kv_split": kv_split, "backend": backend}
    rows = {name: draw.normal(draw.tokens, heads, dim) for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads))}
    rows["d_out"] = draw.seed(draw.tokens, q_heads, dim)
    device = rows["q"].device

    def is_whole(launch: Launch) -> bool:
        return all(p.first == 0 and p.count == batch.lengths[p.sample] for p in launch.placement.pieces)

    def offsets(launch: Launch) -> torch.Tensor:
        edges = {0, launch.placement.rows}
        for piece in launch.placement.pieces:
            edges |= {piece.row, piece.row + piece.count}
        for gap in launch.placement.gaps:
            edges |= set(gap[::GAP])
        return torch.tensor(sorted(edges), device=device)

    cache, table = _pages(rows["k"], rows["v"], batch.lengths, sizes["page"])

    def paged(launch: Launch) -> torch.Tensor:
        pieces = launch.placement.pieces
        starts = torch.tensor([*(p.row for p in pieces), launch.placement.rows], device=device)
        lengths = torch.tensor([p.first + p.count for p in pieces], device=device)
        return paged_attention(launch["q"], cache, table[[p.sample for p in pieces]], starts, lengths, **tiles)

    def forward(launch: Launch) -> Tensors:
        whole = is_whole(launch)
        return {"out": attention(launch["q"], launch["k"], launch["v"], offsets(launch), **tiles) if whole else paged(launch)}

    def gradients(launch: Launch) -> Tensors:
        if not is_whole(launch):
            return owned(launch)
        q, k, v = (leaf(launch[name]) for name in ("q", "k", "v"))
        grads = differentiate(attention(q, k, v, offsets(launch), **tiles), launch["d_out"], q, k, v)
        return dict(zip(("q", "k", "v"), grads))

    def owned(launch: Launch) -> Tensors:
        everything = case.canonical()
        q, k, v, d_out = (everything[name] for name in ("q", "k", "v", "d_out"))
        out, lse2 = attention_with_lse(q, k, v, offsets(everything), **tiles)
        sums = delta(out, d_out, backend=backend)
        at = case.tokens(launch.placement).to(device)
        pieces = [Segment(p.row, p.count, p.first, batch.starts[p.sample], batch.lengths[p.sample]) for p in launch.placement.pieces]
        dq = query_gradient(launch["q"], k, v, launch["d_out"], lse2[at], sums[at], pieces, scale=scale, backend=backend)
        dk, dv = key_gradient(q, launch["k"], launch["v"], d_out, lse2, sums, pieces, scale=scale, backend=backend)
        return {"q": dq, "k": dk, "v": dv}

    def specified(gradient: bool) -> Tensors:
        """One KV head at a time, to keep the scores of long prompts small."""
        group, cu = q_heads // kv_heads, offsets(case.canonical())
        parts = []
        for h in range(kv_heads):
            heads = slice(h * group, (h + 1) * group)
            q, k, v = exact(rows["q"][:, heads]), exact(rows["k"][:, h : h + 1]), exact(rows["v"][:, h : h + 1])
            out = reference.attention(q, k, v, cu, scale=scale)
            parts.append(differentiate(out, rows["d_out"][:, heads].float(), q, k, v) if gradient else (out.detach(),))
        return {name: torch.cat(same, dim=1) for name, same in zip(("q", "k", "v") if gradient else ("out",), zip(*parts))}

    case = OperatorCase(shape, rows, forward, gradients, specified)
    return case


def _pages(k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...], page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in pages handed out in a scattered order, slots beyond a sample's last token NaN; and the page table."""
    needed = [-(-n // page) for n in lengths]
    pages = torch.arange(sum(needed)).flip(0).tolist()
    cache = torch.full((len(pages), k.shape[1], page, 2 * k.shape[2]), torch.nan, dtype=k.dtype, device=k.device)
    table = torch.full((len(lengths), max(needed) + 1), NO_PAGE, dtype=torch.int32, device=k.device)
    row = 0
    for sample, length in enumerate(lengths):
        own = [pages.pop() for _ in range(needed[sample])]
        table[sample, : len(own)] = torch.tensor(own, dtype=torch.int32)
        for first in range(0, length, page):
            count = min(page, length - first)
            at = slice(row + first, row + first + count)
            cache[own[first // page], :, :count] = torch.cat((k[at], v[at]), dim=-1).transpose(0, 1)
        row += length
    return cache, table
