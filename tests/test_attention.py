"""attention: accuracy against its specification, equal bytes in every layout, refusals. The order itself: test_attention_order.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from rlk.contract.judgments import TOLERANCES
from rlk.contract.numerics import DEFAULT
from rlk.contract.topology import padded_length, zigzag_positions
from rlk.kernels import dispatch
from rlk.kernels.attention import attention, attention_with_lse, context, paged_attention, reference

TILE, SPLIT = DEFAULT.kv_tile, DEFAULT.kv_split
HEADS = [
    (4, 4, 32),
    (4, 2, 32),
    (8, 2, 40),
    (8, 1, 32),
    (8, 8, 64),
]  # query heads, kv heads, head dimension: groups 1, 2, 4, 8; 8 and 1 kv heads
EDGES = (1, 15, 16, 17, TILE - 1, TILE, TILE + 1, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT - 1, 2 * SPLIT, 2 * SPLIT + 1)
Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass
class Batch:
    """Packed sequences: q, d_out [T, Hq, D], k, v [T, Hk, D], bf16."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor
    lengths: list[int]

    @property
    def cu(self) -> torch.Tensor:
        return torch.tensor([0, *self.lengths]).cumsum(0)

    @property
    def scale(self) -> float:
        return self.q.shape[2] ** -0.5

    def pick(self, rows: torch.Tensor | slice, lengths: list[int]) -> Batch:
        return Batch(self.q[rows], self.k[rows], self.v[rows], self.d_out[rows], lengths)

    def sequence(self, i: int) -> Batch:
        return self.pick(slice(int(self.cu[i]), int(self.cu[i + 1])), [self.lengths[i]])


def make(lengths: list[int] | tuple[int, ...], heads: int = 4, kv_heads: int = 2, dim: int = 32, seed: int = 7) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)
    q, k, v, d_out = (torch.randn(tokens, h, dim, generator=generator).bfloat16() for h in (heads, kv_heads, kv_heads, heads))
    return Batch(q, k, v, d_out, list(lengths))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def forward(batch: Batch, tile: int = TILE, split: int = SPLIT) -> torch.Tensor:
    return attention(batch.q, batch.k, batch.v, batch.cu, scale=batch.scale, kv_tile=tile, kv_split=split)


def gradients(batch: Batch) -> Grads:
    leaves = [x.clone().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    out = attention(*leaves, batch.cu, scale=batch.scale, kv_tile=TILE, kv_split=SPLIT)
    dq, dk, dv = torch.autograd.grad(out, leaves, batch.d_out)
    return dq, dk, dv


def alone(batch: Batch) -> list[tuple[torch.Tensor, Grads]]:
    """The canonical layout: each sequence by itself."""
    return [(forward(one), gradients(one)) for one in map(batch.sequence, range(len(batch.lengths)))]


class Pages:
    """A paged cache whose unused slots are NaN and whose table is garbage where no page is assigned; pages are handed out shuffled."""

    def __init__(self, batch: Batch, page: int) -> None:
        self.batch, self.page = batch, page
        counts = [-(-n // page) for n in batch.lengths]
        self.cache = torch.full((sum(counts) + 3, batch.k.shape[1], page, 2 * batch.k.shape[2]), math.nan, dtype=torch.bfloat16)
        self.free = torch.randperm(len(self.cache), generator=torch.Generator().manual_seed(3)).tolist()
        self.table = torch.full((len(counts), max(counts) + 2), 2**31 - 1, dtype=torch.int32)
        self.table[1::2] = -1

    def run(self, spans: list[tuple[int, int, int]], split: int = SPLIT) -> torch.Tensor:
        """Write rows first … end-1 of each (sequence, first, end), then attend to them in one call."""
        b, rows = self.batch, []
        for s, first, end in spans:
            for p in range(first, end):
                if p % self.page == 0:
                    self.table[s, p // self.page] = self.free.pop()
                row = int(b.cu[s]) + p
                self.cache[self.table[s, p // self.page], :, p % self.page] = torch.cat((b.k[row], b.v[row]), dim=-1)
                rows.append(row)
        starts = torch.tensor([0, *(end - first for _, first, end in spans)]).cumsum(0)
        table, seq_lens = self.table[[s for s, _, _ in spans]], torch.tensor([end for _, _, end in spans])
        return paged_attention(b.q[rows], self.cache, table, starts, seq_lens, scale=b.scale, kv_tile=TILE, kv_split=split)


def in_chunks(batch: Batch, page: int, chunk: int) -> torch.Tensor:
    """Rollout of all sequences together, ``chunk`` rows of each per step (1: decode)."""
    pages, out = Pages(batch, page), torch.empty_like(batch.q)
    for at in range(0, max(batch.lengths), chunk):
        spans = [(s, at, min(at + chunk, n)) for s, n in enumerate(batch.lengths) if at < n]
        rows = [int(batch.cu[s]) + p for s, first, end in spans for p in range(first, end)]
        out[rows] = pages.run(spans)
    return out


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_forward_and_gradients_are_accurate(heads: int, kv_heads: int, dim: int) -> None:
    batch = make((1, 17, 70, 129), heads, kv_heads, dim)
    exact = [x.float().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    expected = reference.attention(*exact, batch.cu, scale=batch.scale)
    forward_tolerance, gradient_tolerance = TOLERANCES["attention", "bf16"]
    torch.testing.assert_close(forward(batch).float(), expected, atol=forward_tolerance.atol, rtol=forward_tolerance.rtol)
    for ours, theirs in zip(gradients(batch), torch.autograd.grad(expected, exact, batch.d_out.float())):
        torch.testing.assert_close(ours.float(), theirs, atol=gradient_tolerance.atol, rtol=gradient_tolerance.rtol)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_packing_neighbours_and_order_of_sequences_do_not_matter(heads: int, kv_heads: int, dim: int) -> None:
    batch = make((70, 1, 129, 33, 64, 16), heads, kv_heads, dim)
    canonical = alone(batch)
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 0, 4, 1, 3], [2], [3, 2]):
        parts = [batch.sequence(s) for s in order]
        packed = Batch(*(torch.cat([getattr(p, x) for p in parts]) for x in ("q", "k", "v", "d_out")), [batch.lengths[s] for s in order])
        out, grads = forward(packed), gradients(packed)
        for i, s in enumerate(order):
            rows = slice(int(packed.cu[i]), int(packed.cu[i + 1]))
            assert same(out[rows], canonical[s][0]), (order, s)
            assert all(same(ours[rows], expected) for ours, expected in zip(grads, canonical[s][1])), (order, s)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("chunk", [1, 7, TILE, 1000], ids=["decode", "chunk7", "tile", "prefill"])
def test_rollout_gives_the_bytes_of_training(heads: int, kv_heads: int, dim: int, page: int, chunk: int) -> None:
    batch = make((70, 1, 130, 33, 64), heads, kv_heads, dim)
    dispatch.reset_readback()
    assert same(in_chunks(batch, page, chunk), torch.cat([out for out, _ in alone(batch)]))
    assert {r.op for r in dispatch.readback()} == {"attention", "attention.backward", "attention.delta", "attention.paged"}


def test_every_length_gives_the_prefix_of_the_longest() -> None:
    longest = make((2 * SPLIT + 1,))
    whole = forward(longest)
    for length in sorted({*range(1, 71), *EDGES}):
        part = longest.pick(slice(length), [length])
        assert same(forward(part), whole[:length]), length
        pages = Pages(part, 16)
        assert same(pages.run([(0, 0, length - 1), (0, length - 1, length)] if length > 1 else [(0, 0, 1)]), whole[:length]), length


def test_padding_after_a_sequence_changes_no_real_row() -> None:
    """Padding queries without gradient add nothing: outputs and gradients of real rows keep their bytes."""
    lengths = [33, 70]
    batch = make(lengths)
    padded = make([padded_length(n) for n in lengths], seed=11)
    real = torch.cat([torch.arange(n) + int(first) for n, first in zip(lengths, padded.cu)])
    padded.d_out.zero_()
    for name in ("q", "k", "v", "d_out"):
        getattr(padded, name)[real] = getattr(batch, name)
    assert same(forward(padded)[real], forward(batch))
    assert all(same(ours[real], expected) for ours, expected in zip(gradients(padded), gradients(batch)))


def test_hidden_keys_and_earlier_queries_are_selected_away() -> None:
    """A NaN in a key a row does not see, or in a query that does not see a key, is not multiplied by 0."""
    batch = make((70, 40))
    at = 37
    poisoned = batch.pick(torch.arange(110), batch.lengths)
    for x in (poisoned.k, poisoned.v):
        x[at] = math.nan
    out, clean = forward(poisoned), forward(batch)
    assert same(out[:at], clean[:at])
    assert same(out[70:], clean[70:])
    assert out[at:70].isnan().all()
    poisoned = batch.pick(torch.arange(110), batch.lengths)
    for x in (poisoned.q, poisoned.d_out):
        x[at] = math.nan
    (_, dk, dv), (_, clean_dk, clean_dv) = gradients(poisoned), gradients(batch)
    for ours, expected in ((dk, clean_dk), (dv, clean_dv)):
        assert same(ours[at + 1 :], expected[at + 1 :])
        assert ours[: at + 1].isnan().all()


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_do_not_matter(threads: int) -> None:
    batch, before = make((130, 70, 5)), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one, one_grads = forward(batch), gradients(batch)
        torch.set_num_threads(threads)
        assert same(forward(batch), one)
        assert all(same(a, b) for a, b in zip(gradients(batch), one_grads))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_context_parallel_ranks_produce_the_bytes_of_the_whole(cp: int) -> None:
    """Zigzag chunks: a rank's rows of output and dQ from its queries, of dK and dV from its keys."""
    lengths = [padded_length(n) for n in (33, 100, 1)]
    batch = make(lengths)
    out, lse2 = attention_with_lse(batch.q, batch.k, batch.v, batch.cu, scale=batch.scale, kv_tile=TILE, kv_split=SPLIT)
    dq, dk, dv = gradients(batch)
    delta = context.delta(out, batch.d_out)
    for rank in range(cp):
        segments: list[context.Segment] = []
        rows: list[int] = []
        for first, n in zip(batch.cu.tolist(), lengths):
            positions = zigzag_positions(n, cp, rank)
            half = len(positions) // 2
            for piece in (positions[:half], positions[half:]):
                segments.append(context.Segment(len(rows), half, piece[0], first, n))
                rows.extend(first + p for p in piece)
        own = batch.pick(rows, [])  # type: ignore[arg-type]
        own_out, own_lse2 = context.attend(own.q, batch.k, batch.v, segments, scale=batch.scale, kv_tile=TILE, kv_split=SPLIT)
        assert same(own_out, out[rows])
        assert same(own_lse2, lse2[rows])
        assert same(context.delta(own_out, own.d_out), delta[rows])
        assert same(
            context.query_gradient(own.q, batch.k, batch.v, own.d_out, own_lse2, delta[rows], segments, scale=batch.scale), dq[rows]
        )
        pair = context.key_gradient(batch.q, own.k, own.v, batch.d_out, lse2, delta, segments, scale=batch.scale)
        assert same(pair[0], dk[rows])
        assert same(pair[1], dv[rows])
    with pytest.raises(ValueError, match="segments cover"):
        context.attend(batch.q, batch.k, batch.v, [context.Segment(0, 3, 0, 0, 48)], scale=1.0, kv_tile=TILE, kv_split=SPLIT)


def test_key_and_value_planes_and_heads_of_the_cache_are_the_right_ones() -> None:
    """Two kv heads, two pages, every axis its own fill (one visible key: the output is its value)."""
    cache = torch.stack([torch.full((2, 16, 256), float(block)) for block in range(2)])
    cache += torch.tensor([0.0, 0.25])[None, :, None, None]
    cache[..., 128:] += 0.5  # values
    for block, expected in ((0, (0.5, 0.75)), (1, (1.5, 1.75))):
        for strided in (cache.bfloat16(), torch.stack((cache + 8, cache, cache + 4), dim=1).bfloat16()[:, 1]):
            table, starts, lens = torch.tensor([[block, 2**31 - 1]], dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([1])
            out = paged_attention(torch.zeros(1, 4, 128).bfloat16(), strided, table, starts, lens, scale=0.1, kv_tile=TILE, kv_split=SPLIT)
            assert out[0, :, 0].tolist() == [expected[0]] * 2 + [expected[1]] * 2
            assert (out == out[..., :1]).all()


def test_one_launch_over_all_heads_equals_slices_of_heads() -> None:
    batch = make((1024,), 32, 8)
    whole = forward(batch)
    for first in range(0, 8, 2):
        q, kv = slice(4 * first, 4 * first + 8), slice(first, first + 2)
        part = attention(
            batch.q[:, q], batch.k[:, kv], batch.v[:, kv], batch.cu, scale=batch.scale, kv_tile=TILE, kv_split=SPLIT
        )  # fmt: skip
        assert same(part, whole[:, q])


def test_chunk_ends_that_are_not_split_edges_do_not_move_them() -> None:
    batch, split = make((4110,), 1, 1), 4096
    expected = forward(batch, split=split)
    assert not same(expected, forward(batch, split=0))
    for chunk in (4096, 4100):
        pages = Pages(batch, 64)
        assert same(torch.cat([pages.run([(0, 0, chunk)], split), pages.run([(0, chunk, 4110)], split)]), expected)


def test_empty_sequences_and_idle_requests_are_allowed() -> None:
    batch = make((0, 5, 0, 9, 0))
    assert same(forward(batch), torch.cat([out for out, _ in alone(batch)]))
    cache = torch.zeros(2, 2, 16, 64).bfloat16()
    table = torch.full((2, 1), 2**31 - 1, dtype=torch.int32)
    table[1] = 1
    out = paged_attention(
        batch.q[:1], cache, table, torch.tensor([0, 0, 1]), torch.tensor([40, 3]), scale=1.0, kv_tile=TILE, kv_split=SPLIT
    )
    assert same(out, torch.zeros(1, 4, 32).bfloat16())


def test_operators_pass_opcheck() -> None:
    batch = make((5, 20))
    inputs = [x.clone().requires_grad_() for x in (batch.q, batch.k, batch.v)]
    torch.library.opcheck(torch.ops.rlk.attention.default, (*inputs, batch.cu, batch.scale, TILE, SPLIT))
    out, lse2 = attention_with_lse(batch.q, batch.k, batch.v, batch.cu, scale=batch.scale, kv_tile=TILE, kv_split=SPLIT)
    arguments = (batch.q, batch.k, batch.v, out, lse2, batch.d_out, batch.cu, batch.scale)
    torch.library.opcheck(torch.ops.rlk.attention_backward.default, arguments)
    cache, table = torch.zeros(2, 2, 16, 64).bfloat16(), torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    paged = (batch.q, cache, table, batch.cu, torch.tensor([6, 22]), batch.scale, TILE, SPLIT)
    torch.library.opcheck(torch.ops.rlk.paged_attention.default, paged)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.zeros(25, 4, 32)}, ValueError, "must be bf16"),
        ({"k": torch.zeros(25, 3, 32).bfloat16()}, ValueError, "must be bf16"),
        ({"cu_seqlens": torch.tensor([0, 5, 24])}, ValueError, "must ascend from 0 to 25"),
        ({"cu_seqlens": torch.tensor([0, 30, 25])}, ValueError, "must ascend from 0 to 25"),
        ({"kv_tile": 24}, ValueError, "multiple of 16"),
        ({"kv_split": 48}, ValueError, "multiple of kv_tile"),
        ({"backend": "vendor"}, dispatch.BackendUnavailable, "cannot run on device cpu"),
    ],
)
def test_wrong_packed_arguments_are_refused(change: dict[str, object], error: type[Exception], message: str) -> None:
    batch = make((5, 20))
    arguments = {"q": batch.q, "k": batch.k, "v": batch.v, "cu_seqlens": batch.cu, "scale": 1.0, "kv_tile": TILE, "kv_split": SPLIT}
    with pytest.raises(error, match=message):
        attention(**{**arguments, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"block_table": torch.tensor([[0, 2**31 - 1]], dtype=torch.int32)}, IndexError, "outside the cache of 2 pages"),
        ({"block_table": torch.tensor([[0]], dtype=torch.int32)}, ValueError, "2 pages are visible"),
        ({"seq_lens": torch.tensor([2])}, ValueError, "must include the query rows"),
        ({"seq_lens": torch.tensor([20], dtype=torch.int32)}, ValueError, "must be int64"),
        ({"query_start_loc": torch.tensor([0, 2])}, ValueError, "must ascend from 0 to 3"),
        ({"kv_cache": torch.zeros(2, 16, 2, 64).bfloat16().transpose(2, 3)}, ValueError, "must be bf16"),
    ],
)
def test_wrong_paged_arguments_are_refused(change: dict[str, torch.Tensor], error: type[Exception], message: str) -> None:
    arguments = {
        "q": make((3,)).q,
        "kv_cache": torch.zeros(2, 2, 16, 64).bfloat16(),
        "block_table": torch.tensor([[0, 1]], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 3]),
        "seq_lens": torch.tensor([20]),
    }
    with pytest.raises(error, match=message):
        paged_attention(**{**arguments, **change}, scale=1.0, kv_tile=TILE, kv_split=SPLIT)
