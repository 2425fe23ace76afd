"""Certification of FlashAttention 3: every kind of call must have the bytes of one prefill of one sequence, on probe inputs.

Nothing says that a library adds in one order whatever the length, the batch, the pages and the number of query rows, and with automatic
splits it does not. A problem is everything that its choice of a kernel can depend on: heads, their width, packed keys or a page size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from rlk.kernels.attention.vendor_library import LIBRARY
from rlk.kernels.certificate import Certificates, VendorNotCertified, card

Pair = tuple[torch.Tensor, torch.Tensor]
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300, 1000, 3000)
"""Both sides of a group, of a tile and of two tiles; and prompts of hundreds and thousands of tokens."""
CHUNKS = (7, 64, 500, 1024)
MANY = 1100
"""Sequences of one call beyond which the library plans its work in another way, and more."""
_GAP = 5
_SEED = 20_011


class Calls(NamedTuple):
    """The kinds of call that must agree. The last argument of each is the scale.

    whole: q, k, v, offsets of packed sequences; owned: q, gathered k, v, [n, 5] rows of ``context.Segment``; both give out and lse2.
    paged: q, cache, block table, offsets of query rows, lengths; gives out.
    """

    whole: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], Pair]
    owned: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], Pair]
    paged: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


class Found(NamedTuple):
    """What a call gave for some rows of the sequence; lse2: None where it gives none."""

    call: str
    positions: torch.Tensor
    out: torch.Tensor
    lse2: torch.Tensor | None


class Inputs(NamedTuple):
    """q [T, Hq, D], k, v [T, Hk, D] of the longest sequence, bf16."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def at(self, rows: torch.Tensor) -> Inputs:
        return Inputs(*(x[rows] for x in self))


def certify(q: torch.Tensor, kv_heads: int, page: int | None, calls: Calls) -> None:
    """Return if calls like this one have the bytes of a prefill of one sequence; raise VendorNotCertified if one byte differs.

    q: [T, Hq, D]; page: None for packed keys. The first call of its kind is probed here, which takes about a hundred launches and makes
    the host wait; under graph capture it is refused instead.
    """
    problem = f"{q.shape[1]} query heads, {kv_heads} kv heads, {q.shape[2]} wide, {'packed' if page is None else f'pages of {page}'}"
    device = q.device.index
    if problem in CERTIFICATES.known(device):
        return
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise VendorNotCertified(f"attention: {problem} is not certified: run it once before the graph is captured")
    scale = q.shape[2] ** -0.5
    with torch.no_grad():
        for kind, inputs in _inputs(q.shape[1], kv_heads, q.shape[2], q.device):
            expected = calls.whole(*inputs, _offsets([max(LENGTHS)], q.device), scale)
            found = _packed(inputs, calls, scale) if page is None else _paged(inputs, page, calls, scale)
            for one in found:
                _require_same(problem, kind, one, expected)
    CERTIFICATES.keep(device, problem)


def _where(device: int) -> dict[str, str]:
    """What a certificate holds for: card, driver, library and the source that calls it."""
    return {
        **card(device),
        "library": f"FlashAttention 3 of vLLM {LIBRARY.version}",
        "torch": torch.__version__,
        "vendor": LIBRARY.kernel_id,
    }


CERTIFICATES = Certificates("attention", _where)


def _require_same(problem: str, kind: str, found: Found, expected: Pair) -> None:
    for name, actual, wanted in (("out", found.out, expected[0]), ("lse2", found.lse2, expected[1])):
        if actual is None:
            continue
        wanted = wanted[found.positions]
        bits = torch.int16 if actual.element_size() == 2 else torch.int32
        differing = actual.contiguous().view(bits) != wanted.contiguous().view(bits)
        if bool(differing.any()):
            row, *rest = differing.nonzero()[0].tolist()
            raise VendorNotCertified(
                f"attention: FlashAttention 3 of vLLM {LIBRARY.version} differs from its prefill of one sequence in "
                f"{int(differing.sum())} of {differing.numel()} elements of {name} {list(actual.shape)}, first at {[row, *rest]} "
                f"(position {int(found.positions[row])}), in {found.call} of {problem} on {kind} inputs: use attention_family fixed-split"
            )


def _inputs(heads: int, kv_heads: int, dim: int, device: torch.device) -> Iterator[tuple[str, Inputs]]:
    """Normal values; peaked scores and values of very different size; zeros of both signs, subnormals, huge values, scores of thousands.

    All scores and sums are finite, and NaN stands only where no row of the sequence looks. The library does not promise more: what it
    masks inside a tile it multiplies by 0, and only in tiles that it masks does it guard against rows whose scores so far are all −Inf.
    """
    random = torch.Generator(device).manual_seed(_SEED)
    rows = max(LENGTHS)
    draw = lambda h: torch.randn(rows, h, dim, generator=random, device=device)
    q, k, v = draw(heads), draw(kv_heads), draw(kv_heads)
    yield "normal", Inputs(*(x.bfloat16() for x in (q, k, v)))
    sizes = torch.exp2(torch.randint(-20, 21, (rows, 1, 1), generator=random, device=device).float())
    yield "wide-ranging", Inputs((8 * q).bfloat16(), k.bfloat16(), (v * sizes).bfloat16())
    k, v = k.bfloat16(), v.bfloat16()
    v[::3], v[1::7], v[5::11], v[6::13], v[7::13] = 0.0, -0.0, 1e-39, 1e30, -1e30
    k[::4, :, 1::9], k[rows * 11 // 12 :, :, ::5] = -1e-39, 1e3
    yield "extreme", Inputs(q.bfloat16(), k, v)


def _packed(inputs: Inputs, calls: Calls, scale: float) -> Iterator[Found]:
    """All lengths in one batch with NaN between them, each length alone before NaN, and ranks that own a part of the queries."""
    q, device = inputs.q, inputs.q.device
    longest = max(LENGTHS)
    gap = torch.full((_GAP,), longest, device=device)
    poisoned = Inputs(*(torch.cat((x, x.new_full((_GAP, *x.shape[1:]), torch.nan))) for x in inputs))
    rows = torch.cat([part for n in LENGTHS for part in (torch.arange(n, device=device), gap)])
    batch = poisoned.at(rows)
    out, lse2 = calls.whole(*batch, _offsets([part for n in LENGTHS for part in (n, _GAP)], device), scale)
    real = rows < longest
    yield Found(f"a batch of lengths {LENGTHS}", rows[real], out[real], lse2[real])
    short = [n for n in LENGTHS if n < 64]
    lengths = (short * (-(-MANY // len(short))))[:MANY]
    rows = torch.cat([torch.arange(n, device=device) for n in lengths])
    yield Found(f"a batch of {MANY} sequences", rows, *calls.whole(*inputs.at(rows), _offsets(lengths, device), scale))
    for n in LENGTHS:
        alone = Inputs(*(torch.cat((x[:n], x.new_full((_GAP, *x.shape[1:]), torch.nan)))[:n] for x in inputs))
        yield Found(f"a prefill of length {n}", torch.arange(n, device=device), *calls.whole(*alone, _offsets([n], device), scale))
    spans = [*_mixed(longest), *((n - 1, n) for n in LENGTHS)]
    first = [0, *accumulate(end - start for start, end in spans)]
    segments = torch.tensor([(row, end - start, start, 0, end) for row, (start, end) in zip(first, spans)])
    positions = _positions(spans, device)
    yield Found("queries of one rank", positions, *calls.owned(q[positions], inputs.k, inputs.v, segments, scale))


def _paged(inputs: Inputs, page: int, calls: Calls, scale: float) -> Iterator[Found]:
    """Chunked prefill, decode in one batch and alone, both in one step, and a step in which other requests are idle."""
    longest, device = max(LENGTHS), inputs.q.device
    cache, pages = _pages(inputs, page)

    def step(call: str, spans: Sequence[tuple[int, int]]) -> Found:
        positions, ends = _positions(spans, device), torch.tensor([end for _, end in spans], device=device)
        used = torch.arange(len(pages) + 2, device=device) < ((ends + page - 1) // page)[:, None]
        table = torch.where(used, torch.nn.functional.pad(pages, (0, 2)), torch.tensor(2**31 - 1, device=device)).int()
        starts = _offsets([end - start for start, end in spans], device)
        return Found(call, positions, calls.paged(inputs.q[positions], cache, table, starts, ends, scale), None)

    for chunk in CHUNKS:
        spans = [(at, min(at + chunk, longest)) for at in range(0, longest, chunk)]
        yield step(f"prefill in chunks of {chunk}", spans)
        yield step(f"the last chunk of {chunk}", spans[-1:])
    yield step(f"decode at lengths {LENGTHS}", [(n - 1, n) for n in LENGTHS])
    for n in LENGTHS:
        yield step(f"decode at length {n}", [(n - 1, n)])
    yield step(f"decode of {MANY} requests", [(n - 1, n) for n in (LENGTHS * (-(-MANY // len(LENGTHS))))[:MANY]])
    yield step("decode and prefill in one step", _mixed(longest))
    yield step("one request beside idle ones", [*[(0, 0)] * 40, (longest - min(40, longest), longest)])


def _mixed(longest: int) -> list[tuple[int, int]]:
    """Prefills, their continuations and decode rows."""
    at = lambda part: longest * part // 30
    return [(at(24) - 1, at(24)), (0, at(7)), (at(10), at(10) + 2), (at(9) - 1, at(9)), (at(15), at(25)), (0, 1), (at(29), longest)]


def _pages(inputs: Inputs, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values in shuffled pages [pages, Hk, page, 2·D], other slots NaN; and the page of each ``page`` positions."""
    rows, device = len(inputs.k), inputs.k.device
    count = -(-rows // page)
    pages = torch.randperm(count + 3, generator=torch.Generator().manual_seed(_SEED))[:count].to(device)
    cache = inputs.k.new_full((count + 3, inputs.k.shape[1], page, 2 * inputs.k.shape[2]), torch.nan)
    position = torch.arange(rows, device=device)
    cache[pages[position // page], :, position % page] = torch.cat((inputs.k, inputs.v), dim=-1)
    return cache, pages


def _positions(spans: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(start, end, device=device) for start, end in spans])


def _offsets(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], device=device)
