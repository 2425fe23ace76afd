"""Run by test_triton_attention_aot.py under TRITON_INTERPRET=1: indices, masks and unwritten rows of attention and logp, on a CPU.

The interpreter multiplies bf16 as bit patterns and truncates to it, so products are replaced here and judged within a loose tolerance:
never bytes, and never an operator's arithmetic. Fresh memory is NaN, and so is every slot of a page that no row may read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from rlk.contract.topology import token_leaves
from rlk.kernels.attention import reference, triton_forward
from rlk.kernels.attention import triton as attention
from rlk.kernels.attention.triton import Tiles
from rlk.kernels.batch_invariant_logp import triton as fused
from rlk.kernels.batch_invariant_logp.reference import batch_invariant_logp
from rlk.kernels.logp import triton as logp
from rlk.kernels.logp.shards import Columns


def _values(handle: Any) -> Any:
    return (handle.data.astype(np.uint32) << 16).view(np.float32) if handle.dtype.scalar == tl.bfloat16 else handle.data


def _dot(_: Any, a: Any, b: Any, d: Any, *__: Any) -> Any:
    return interpreter.TensorHandle(np.matmul(_values(a), _values(b), dtype=np.float32) + d.data, d.dtype.scalar)


def same(name: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 4e-2) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance, msg=lambda text: f"{name}: {text}")
    print("ok", name)


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def attend(lengths: tuple[int, ...], heads: int, kv_heads: int, dim: int, tile: int, split: int) -> None:
    name = f"{heads}/{kv_heads} heads of {dim}, {tile}/{split}"
    rows, cu, scale = sum(lengths), torch.tensor([0, *lengths]).cumsum(0), dim**-0.5
    joined, d_out = bf16(rows, heads + 2 * kv_heads, dim), bf16(rows, heads, dim)
    q, k, v = joined.split((heads, kv_heads, kv_heads), dim=1)  # strided views
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    expected = reference.attention(*leaves, cu, scale=scale)
    wanted = torch.autograd.grad(expected, leaves, d_out.float())
    out, lse2 = attention.run_attention(q, k, v, cu, scale, tile, split)
    same(f"forward, {name}", out, expected.detach())
    keys, segments = attention.packed(k, v), attention.whole(cu)
    apart = attention.run_forward("attention", q, keys, segments, scale, tile, split, True, Tiles(16, tile, 4, 1), 2)
    same(f"splits apart, {name}", apart[0], out, 1e-3)
    same(f"splits apart, {name}: lse2", apart[1], lse2, 1e-3)
    grads = attention.run_backward(q, k, v, out, lse2, d_out, cu, scale)
    for what, actual, want in zip("qkv", grads, wanted, strict=True):
        same(f"d{what}, {name}", actual, want, 1e-1)
    _pages(name, q, k, v, out, lengths, scale, tile, split)
    _owned(name, (q, k, v, d_out, lse2, attention.run_delta(out, d_out)), out, grads, lengths, scale, tile, split)


def pages(k: torch.Tensor, v: torch.Tensor, lengths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in shuffled pages of 16, every other slot NaN; the page table, whose other entries are outside the cache."""
    counts = [-(-n // 16) for n in lengths]
    cache = torch.full((sum(counts) + 2, k.shape[1], 16, 2 * k.shape[2]), float("nan")).bfloat16()
    table = torch.full((len(lengths), max(counts) + 1), 10**9, dtype=torch.int32)
    free, first = torch.randperm(len(cache)).tolist(), 0
    for s, n in enumerate(lengths):
        table[s, : counts[s]] = torch.tensor([free.pop() for _ in range(counts[s])], dtype=torch.int32)
        for p in range(n):
            cache[table[s, p // 16], :, p % 16] = torch.cat((k[first + p], v[first + p]), dim=-1)
        first += n
    return cache, table


def _pages(
    name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lengths: tuple[int, ...], scale: float, tile: int,
    split: int,
) -> None:  # fmt: skip
    """The last rows of every sequence over pages of 16, everything that they do not see NaN or out of range."""
    taken = [min(n, 5) for n in lengths]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    picked = [end - count + i for end, count in zip(ends, taken, strict=True) for i in range(count)]
    cache, table = pages(k, v, lengths)
    starts = torch.tensor([0, *taken]).cumsum(0)
    got = attention.run_paged(q[picked], cache, table, starts, torch.tensor(lengths), scale, tile, split)
    same(f"pages, {name}", got, out[picked], 1e-3)
    longest = max(range(len(lengths)), key=lambda s: lengths[s])
    table[longest, 0] = -1
    got = attention.run_paged(q[picked], cache, table, starts, torch.tensor(lengths), scale, tile, split)
    broken = torch.zeros(len(picked), dtype=torch.bool)
    broken[int(starts[longest]) : int(starts[longest + 1])] = True
    assert bool(got[broken].isnan().all()), f"{name}: a visible page outside the cache must give NaN"
    same(f"a page outside the cache, {name}", got[~broken], out[picked][~broken], 1e-3)


def decode(lengths: tuple[int, ...], taken: tuple[int, ...], heads: int, kv_heads: int, dim: int, tile: int, split: int) -> None:
    """At most as many rows as sequences, some of which have none and some several; by one program to more than there are splits."""
    rows, cu, scale = sum(lengths), torch.tensor([0, *lengths]).cumsum(0), dim**-0.5
    q, k, v = (bf16(rows, h, dim) for h in (heads, kv_heads, kv_heads))
    out, _ = attention.run_attention(q, k, v, cu, scale, tile, split)
    picked: list[int] = [int(cu[s + 1]) - taken[s] + i for s in range(len(lengths)) for i in range(taken[s])]
    cache, table = pages(k, v, lengths)
    keys = attention.paged(cache, table, torch.tensor(lengths))
    segments = attention.Segments(torch.tensor([0, *taken]).cumsum(0), len(lengths), triton_forward.PAGED.value)
    for programs in (1, 2, 5, 16):
        got = attention.run_decode(q[picked], keys, segments, scale, tile, split, programs=programs)
        same(f"decode by {programs}, {tile}/{split}", got, out[picked], 1e-3)
    table[-1, 0] = -1
    got = attention.run_decode(q[picked], keys, segments, scale, tile, split, programs=2)
    kept = len(picked) - taken[-1]
    assert bool(got[kept:].isnan().all()), f"{tile}/{split}: a visible page outside the cache must give NaN in a decode step"
    same(f"decode beside a page outside the cache, {tile}/{split}", got[:kept], out[picked][:kept], 1e-3)


def rows_of_no_sequence(first: int, count: int, behind: int, tile: int, split: int) -> None:
    """Offsets that nothing has checked: rows in front of the first sequence, and behind the last, are left as they are."""
    rows, at, scale = first + count + behind, slice(first, first + count), 16**-0.5
    q, k, v = (bf16(rows, h, 16) for h in (3, 1, 1))
    alone = attention.run_attention(q[at], k[at], v[at], torch.tensor([0, count]), scale, tile, split)
    segments = attention.whole(torch.tensor([first, first + count]))
    for programs in (1, 2):
        got = attention.run_forward(
            "attention", q, attention.packed(k, v), segments, scale, tile, split, True, Tiles(16, tile, 4, 1), programs
        )  # fmt: skip
        for what, x, y in zip(("out", "lse2"), got, alone, strict=True):
            same(f"{what} of {count} rows behind {first}, by {programs}", x[at], y, 1e-3)
            assert bool(x[:first].isnan().all() and x[first + count :].isnan().all()), "rows of no sequence must not be written"


def _owned(
    name: str, inputs: tuple[torch.Tensor, ...], out: torch.Tensor, grads: tuple[torch.Tensor, ...], lengths: tuple[int, ...],
    scale: float, tile: int, split: int,
) -> None:  # fmt: skip
    """The middle third of every sequence."""
    q, k, v, d_out, lse2, delta = inputs
    first, picked, segments = 0, [], []
    for n in lengths:
        a, b = n // 3, 2 * n // 3
        segments.append((len(picked), b - a, a, first, n))
        picked += range(first + a, first + b)
        first += n
    own, table = torch.tensor(picked), torch.tensor(segments)
    same(f"owned, {name}", attention.forward(q[own], k, v, table, scale, tile, split)[0], out[own], 1e-3)
    dq = attention.query_gradient(q[own], k, v, d_out[own], lse2[own], delta[own], table, scale)
    same(f"owned dq, {name}", dq, grads[0][own], 1e-3)
    for what, actual, want in zip(
        "kv", attention.key_gradient(q, k[own], v[own], d_out, lse2, delta, table, scale), grads[1:], strict=True
    ):
        same(f"owned d{what}, {name}", actual, want[own], 1e-3)


def score(vocab: int, padded: int, shards: int, tile: int, hidden: int) -> None:
    name, rows = f"{vocab} of {padded} in {shards} shards of tiles of {tile}", 7
    h, w = bf16(rows, hidden), bf16(padded, hidden) * 0.3
    ids, temperature, seed = torch.randint(0, vocab, (rows,)), torch.rand(rows) + 0.5, torch.randn(rows)
    support = torch.rand(rows, padded) < 0.3
    support[:, vocab:] = False
    support[torch.arange(rows), ids] = True
    active = torch.arange(rows) % 3 != 1
    leaves = token_leaves((rows,), canonical_cp=2)
    index, offsets = torch.tensor(leaves.index), torch.tensor(leaves.offsets)
    logits = (h.float() @ w.float().T).contiguous()
    logits[:, vocab:] = float("nan")
    for on, mask in ((None, None), (support, active)):
        lit = torch.ones(rows, dtype=torch.bool) if mask is None else mask
        ids[~lit], temperature[~lit] = -7, float("nan")
        leaf, weight = h.float().requires_grad_(), w.float().requires_grad_()
        safe = torch.where(lit, ids, 0), torch.where(lit, temperature, 1.0)
        expected, _ = batch_invariant_logp(leaf, weight, *safe, vocab, on)
        expected = torch.where(lit, expected, 0.0)
        dh, dw = torch.autograd.grad(expected, (leaf, weight), torch.where(lit, seed, 0.0))
        arguments, sizes = (ids, temperature, on, mask), (vocab, padded, shards, tile)
        got, lse = logp.run_logp(logits, *arguments, *sizes)
        same(f"logp, {name}", got, expected.detach(), 1e-4)
        slopes = logp.run_backward(logits, *arguments, lse, seed, vocab)
        same(f"dlogits, {name}", slopes @ w.float(), dh, 1e-1)
        half = padded // 2
        columns = [Columns(at, shards // 2, padded // shards, vocab) for at in (0, half)]
        cut = [(slice(None), slice(c.first, c.first + half)) for c in columns]
        parts = [logp.part(logits[at], ids, temperature, None if on is None else on[at], mask, c, tile) for c, at in zip(columns, cut)]
        same(f"two ranks, {name}", logp.join(torch.stack(parts), ids, mask, half)[0], got, 1e-5)
        own, own_lse = fused.run_forward(h, w, *arguments, *sizes)
        same(f"head, {name}", own, expected.detach(), 1e-3)
        same(f"head dh, {name}", fused.run_input_grad(h, w, *arguments, own_lse, seed, vocab, padded, shards), dh, 1e-1)
        some = range(3, vocab + 1)
        pieces = fused.batch_invariant_logp_weight_grad(h, w, *arguments, own_lse, seed, index, offsets, vocab, tile, some)
        same(f"head dw, {name}", pieces, dw[some.start : some.stop], 1e-1)
    assert bool(logp.run_logp(logits, ids.clamp(min=0), torch.zeros(rows), None, None, *sizes)[0].isnan().all()), "T = 0 must give NaN"
    assert bool(logp.run_logp(logits, ids * 0 + vocab, torch.ones(rows), None, None, *sizes)[0].isnan().all()), "padding must give NaN"


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    interpreter.InterpreterBuilder.create_dot = _dot
    attend((1, 19, 0, 40), 3, 1, 16, 16, 32)
    attend((26, 3), 2, 2, 24, 48, 0)
    rows_of_no_sequence(41, 39, 5, 16, 32)
    decode((1, 19, 5, 140), (1, 1, 0, 1), 3, 1, 16, 16, 32)
    decode((1, 19, 60, 40, 3), (0, 0, 2, 1, 1), 2, 2, 24, 48, 0)
    fused.ROWS = 4
    score(150, 256, 4, 32, 24)
    print("every index and mask is right")
