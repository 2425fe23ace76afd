"""FlashAttention 3 with one split on a card: the bytes of the family vendor-one-split, its certification, planted faults and times.

    OUT=. PYTHONPATH=. python tests/gpu/check_vendor_attention.py [section ...]

Needs vLLM for CUDA. Writes $OUT/check_vendor_attention.json and exits 1 if a check failed.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

os.environ["FAMILY"] = "vendor-one-split"

import check_attention as family
import torch
from check_attention import DIM, HEADS, KV_HEADS, SCALE, Inputs, Pages, forward, gradients, make, offsets
from report import Report, graphed, main
from torch.nn.functional import scaled_dot_product_attention as sdpa

from rlk.acceptance.cell import Cell
from rlk.acceptance.collector import Evidence
from rlk.acceptance.judge import judge_cell
from rlk.acceptance.measure import measure
from rlk.acceptance.ws1 import ws1_cells
from rlk.contract.judgments import JUDGMENTS
from rlk.contract.numerics import HOPPER
from rlk.evidence.schema import CellRecord, Status
from rlk.kernels.attention import attention, paged_attention
from rlk.kernels.attention.vendor import CALLS
from rlk.kernels.attention.vendor_certificate import CERTIFICATES, certify
from rlk.kernels.attention.vendor_library import LIBRARY
from rlk.kernels.certificate import VendorNotCertified
from rlk.kernels.registry import declared_kernels

FA3: dict[str, Any] = {"kv_tile": 128, "kv_split": 0, "backend": "vendor"}
TRITON: dict[str, Any] = {"kv_tile": HOPPER.kv_tile, "kv_split": HOPPER.kv_split, "backend": "triton"}


@contextmanager
def library(**changed: Any) -> Iterator[None]:
    """The library called with other arguments, by their names in its own schema."""
    honest = LIBRARY._function
    names = [argument.name for argument in honest._schema.arguments]

    def call(*arguments: Any) -> Any:
        return honest(*(changed.get(name, value) for name, value in zip(names, arguments, strict=True)))

    LIBRARY.__dict__["_function"] = call
    try:
        yield
    finally:
        LIBRARY.__dict__["_function"] = honest


@contextmanager
def uncertified() -> Iterator[None]:
    """As on a card where nothing was certified before."""
    before = os.environ.get("RLK_CACHE_DIR")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["RLK_CACHE_DIR"] = folder
        CERTIFICATES.forget()
        try:
            yield
        finally:
            CERTIFICATES.forget()
            del os.environ["RLK_CACHE_DIR"]
            if before is not None:
                os.environ["RLK_CACHE_DIR"] = before


def certificate(report: Report) -> None:
    """Every kind of call is certified; other orders and a capture before it are refused."""
    with uncertified():
        for heads, kv_heads, dim in ((32, 8, 128), (16, 8, 32), (16, 2, 128), (4, 1, 128), (8, 2, 64)):
            for page in (None, 16, 64):
                began = time.perf_counter()
                try:
                    certify(torch.empty(1, heads, dim, device="cuda"), kv_heads, page, CALLS)
                    torch.cuda.synchronize()
                    report.holds("certified", True, case=f"{heads}/{kv_heads}/{dim} {page}", seconds=round(time.perf_counter() - began, 2))
                except VendorNotCertified as error:
                    report.holds("certified", False, says=str(error))
    for splits, page in ((0, 16), (3, 16), (3, None)):  # packed sequences of the probed sizes get one split anyway
        name = f"{'three' if splits else 'automatic'} splits, {'packed' if page is None else f'pages of {page}'}"
        with uncertified(), library(num_splits=splits):
            _refused(report, name, torch.empty(1, HEADS, DIM, device="cuda"), page)
    b, cu = make(64), offsets((64,))
    with uncertified():
        forward(b, (64,))
        CERTIFICATES.forget()
        os.environ["RLK_CACHE_DIR"] += "/empty"
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                attention(b.q, b.k, b.v, cu, scale=SCALE, **FA3)
            report.holds("nothing is certified during a capture", False)
        except VendorNotCertified as error:
            report.holds("nothing is certified during a capture", True, says=str(error))


def _refused(report: Report, name: str, q: torch.Tensor, page: int | None) -> None:
    try:
        certify(q, KV_HEADS, page, CALLS)
        report.holds(f"planted: {name}", False)
    except VendorNotCertified as error:
        report.holds(f"planted: {name}", True, says=str(error))


def cells(report: Report) -> None:
    """The family's cells of the operator scope, judged; automatic splits in the place of one must turn a cell red."""
    mine = [c for c in ws1_cells("cuda") if (c.subject, c.backend) == ("attention", "vendor") and c.required]
    report.holds("required cells", len(mine) == 4)
    for cell in mine:
        record = _judged(cell)
        compared = sum(c.elements for c in record.comparisons)
        report.holds(cell.cell_id, record.status is Status.PASS, reasons=list(record.reasons), elements=compared)
    (primary,) = (c for c in mine if c.cell_id.endswith("primary-vendor/forward_invariance"))
    with library(num_splits=0):
        record = _judged(primary)
    report.holds("planted: automatic splits in the cells", record.status is Status.FAIL, reasons=list(record.reasons)[:2])


def _judged(cell: Cell) -> CellRecord:
    evidence = Evidence()
    judgment = next(j for j in JUDGMENTS if j.name == cell.judgment)
    measure(cell.subject, "primary" if cell.workload.startswith("primary") else "short", judgment, cell.backend, evidence)
    return judge_cell(cell, evidence.close(), [], declared_kernels())


def planted(report: Report) -> None:
    """Faults that the byte comparisons of this family must see."""
    b = make(2500)
    right = forward(b, (2500,))
    pages = Pages(b, 16)
    spans = [(n - 1, n) for n in range(1000, 2500, 137)]
    wanted = right[[n - 1 for _, n in spans]]
    report.same("control of the next", "decode", torch.cat([pages.run(b.q, [span]) for span in spans]), wanted)
    with library(num_splits=0):
        report.differs("decode with automatic splits", torch.cat([pages.run(b.q, [span]) for span in spans]), wanted)
    rows = torch.arange(2500, device="cuda") < 300
    poisoned = Inputs(*(torch.where(rows[:, None, None], x, torch.nan) for x in b))
    report.same("NaN in the next sequence does not show", "300", forward(poisoned, (300, 2200))[:300], right[:300])
    leaves = gradients(poisoned, (300, 2200))
    for name, got, want in zip("qkv", leaves, gradients(b.at(slice(0, 300)), (300,)), strict=True):
        report.same("NaN in the next sequence does not show", f"d{name}", got[:300], want)
    report.same("empty sequences", "0, 2500, 0", forward(b, (0, 2500, 0)), right)
    pages = Pages(b, 64)
    starts, ends = torch.tensor([0, 1, 2], device="cuda"), torch.tensor([300, 2500], device="cuda")
    narrow = [pages.table.repeat(2, 1), starts.int(), ends.int()]
    out = paged_attention(b.q[ends - 1], pages.cache, *narrow, scale=SCALE, **FA3)
    report.same("offsets and lengths as int32", "decode", out, right[ends - 1])


def _prefill(report: Report, n: int, batch: int) -> None:
    b, cu = make(n * batch), offsets((n,) * batch)
    q, k, v = (x.view(batch, n, -1, DIM).transpose(1, 2) for x in b[:3])
    starts = cu.int()
    raw = partial(LIBRARY.forward, b.q, b.k, b.v, scale=SCALE, q_starts=starts, k_starts=starts, most_rows=n, most_keys=n)
    run = partial(attention, b.q, b.k, b.v, cu, scale=SCALE)
    arms: dict[str, Callable[[], Any]] = {
        "fa3 one split": graphed(partial(run, **FA3))[0],
        "library alone": graphed(raw)[0],
        "triton fixed split": graphed(partial(run, **TRITON))[0],
        "sdpa": graphed(lambda: sdpa(q, k, v, is_causal=True, enable_gqa=True))[0],
    }
    with library(num_splits=0):
        arms["fa3 automatic"] = graphed(raw)[0]
    report.timed(f"prefill {n} x {batch}", arms, gflop=4 * HEADS * DIM * batch * n * n / 2 / 1e9)


def _decode(report: Report, n: int, batch: int) -> None:
    cache = torch.randn(batch * n // 16, KV_HEADS, 16, 2 * DIM, device="cuda", dtype=torch.bfloat16)
    table = torch.randperm(len(cache), device="cuda").int().view(batch, -1)
    q, starts, ends = make(batch).q, torch.arange(batch + 1, device="cuda"), torch.full((batch,), n, device="cuda")
    run = partial(paged_attention, q, cache, table, starts, ends, scale=SCALE)
    one = partial(run, **FA3)
    arms: dict[str, Callable[[], Any]] = {
        "fa3 one split": graphed(one)[0],
        "triton fixed split": graphed(partial(run, **TRITON))[0],
    }
    with library(num_splits=0):
        arms["fa3 automatic"] = graphed(one)[0]
    if batch * n <= 1 << 18:  # it reads keys in one piece
        keys = cache[table.long()].transpose(1, 2).flatten(2, 3)
        k, v = keys[..., :DIM].contiguous(), keys[..., DIM:].contiguous()
        arms["sdpa"] = graphed(lambda: sdpa(q[:, :, None], k, v, enable_gqa=True))[0]
    report.timed(f"decode {batch} x {n}", arms, megabytes=4 * n * batch * KV_HEADS * DIM / 1e6)


def times(report: Report) -> None:
    """The family's operator beside the library alone and with automatic splits, the Triton family and torch."""
    b, cu = make(64), offsets((64,))
    table, starts = torch.zeros(64, 4, dtype=torch.int32, device="cuda"), torch.arange(65, device="cuda")
    cache = torch.zeros(1, KV_HEADS, 16, 2 * DIM, device="cuda").bfloat16()
    arms: dict[str, Callable[[], Any]] = {}
    for name, sizes in (("fa3", FA3), ("triton", TRITON)):
        arms[f"attention {name}"] = partial(attention, b.q, b.k, b.v, cu, scale=SCALE, **sizes)
        arms[f"paged {name}"] = partial(paged_attention, b.q, cache, table, starts, starts[1:], scale=SCALE, **sizes)
    report.host_time("host time of a call", arms)
    for n, batch in ((512, 8), (2048, 4), (8192, 1), (32768, 1)):
        _prefill(report, n, batch)
    for n, batch in ((1024, 1), (8192, 1), (32768, 1), (1024, 32), (8192, 32), (32768, 32)):
        _decode(report, n, batch)


SECTIONS = {
    run.__name__: run
    for run in (
        certificate, cells, family.accuracy, family.lengths_short, family.prefills_short, family.lengths_long, family.chunks,
        family.layouts, planted, family.repetitions, times,
    )
}  # fmt: skip

if __name__ == "__main__":
    main("check_vendor_attention", SECTIONS)
