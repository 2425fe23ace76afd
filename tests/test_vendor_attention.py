"""The vendor backend of attention without a card: what its certification keeps and refuses, and what the library is told."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlk.kernels._triton.aot import compile_launch
from rlk.kernels._triton.launch import recorded
from rlk.kernels.attention import context, cpu, vendor, vendor_certificate, vendor_rows
from rlk.kernels.attention.context import Segment
from rlk.kernels.attention.vendor_certificate import Calls, Pair
from rlk.kernels.certificate import Certificates, VendorNotCertified
from rlk.kernels.dispatch import BackendUnavailable, readback, reset_readback

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 32, 32**-0.5
TILE = 16
FORWARD = ("forward_accuracy", "forward_invariance")
Q = torch.empty(1, HEADS, DIM)

# A library with one split: the CPU backend.


def _whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float, split: int = 0) -> Pair:
    return cpu.forward(q, k, v, cpu._whole(cu), scale, TILE, split)


def _owned(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, scale: float) -> Pair:
    return cpu.forward(q, k, v, segments, scale, TILE, 0)


def _paged(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, scale: float, split: int = 0
) -> torch.Tensor:
    return cpu.paged_attention(q, cache, table, starts, ends, scale, TILE, split)


HONEST = Calls(_whole, _owned, _paged)


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(vendor_certificate, "CERTIFICATES", Certificates("attention", lambda device: {"card": "none"}))
    monkeypatch.setattr(vendor_certificate, "LENGTHS", (1, 15, 16, 17, 33, 127, 128, 130))
    monkeypatch.setattr(vendor_certificate, "CHUNKS", (7, 64))
    monkeypatch.setattr(vendor_certificate, "MANY", 20)
    monkeypatch.setitem(vendor.LIBRARY.__dict__, "version", "0.0")
    return tmp_path / "vendor"


def test_a_problem_is_probed_once_and_kept(certificates: Path) -> None:
    calls = []

    def counted(*arguments: Any) -> Pair:
        calls.append(arguments)
        return _whole(*arguments)

    count = lambda: len(calls)
    for page in (None, 16):
        vendor_certificate.certify(Q, KV_HEADS, page, HONEST._replace(whole=counted))
        probed = count()
        assert probed
        vendor_certificate.certify(Q, KV_HEADS, page, HONEST._replace(whole=counted))
        vendor_certificate.CERTIFICATES.forget()  # as in the next process
        vendor_certificate.certify(Q, KV_HEADS, page, HONEST._replace(whole=counted))
        assert count() == probed
    (file,) = certificates.glob("attention-*.json")
    assert json.loads(file.read_text()) == {
        "card": "none",
        "certified": ["4 query heads, 2 kv heads, 32 wide, packed", "4 query heads, 2 kv heads, 32 wide, pages of 16"],
    }


def _splits_by_length(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float) -> Pair:
    return _whole(q, k, v, cu, scale, 0 if len(cu) > 2 or len(q) == max(vendor_certificate.LENGTHS) else TILE)


def _reads_on(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor, scale: float) -> Pair:
    """Multiplies the values after a sequence by 0."""
    out, lse2 = _whole(q, k, v, cu, scale)
    for first, end in zip(cu[:-1].tolist(), cu[1:].tolist()):
        out[first:end] += 0 * v[end : end + 3].sum()
    return out, lse2


def _other_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: torch.Tensor, scale: float) -> Pair:
    out, lse2 = _owned(q, k, v, segments, scale)
    return out, torch.nextafter(lse2, lse2.new_tensor(math.inf))


def _alone_is_another_order(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, scale: float
) -> torch.Tensor:
    return _paged(q, cache, table, starts, ends, scale, TILE if len(q) == 1 else 0)


def _reads_the_next_page(
    q: torch.Tensor, cache: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, scale: float
) -> torch.Tensor:
    page = cache.shape[2]
    return _paged(q, cache, table, starts, torch.minimum(ends + 1, (ends + page - 1) // page * page), scale)


@pytest.mark.parametrize(
    ("calls", "page", "message"),
    [
        (HONEST._replace(whole=_splits_by_length), None, r"of out \[17, 4, 32\], first at \[\d+, \d, \d+\] .*a prefill of length 17"),
        (HONEST._replace(whole=_reads_on), None, r"of out .*a batch of lengths \(1, 15"),
        (HONEST._replace(owned=_other_lse), None, r"of lse2 .*position \d+\), in queries of one rank"),
        (HONEST._replace(paged=_alone_is_another_order), 16, r"of 128 elements of out \[1, 4, 32\].* pages of 16 on normal inputs"),
        (HONEST._replace(paged=_reads_the_next_page), 64, r"of out .*prefill in chunks of 7"),
    ],
)  # fmt: skip
def test_another_order_is_not_certified(certificates: Path, calls: Calls, page: int | None, message: str) -> None:
    with pytest.raises(VendorNotCertified, match=message):
        vendor_certificate.certify(Q, KV_HEADS, page, calls)
    assert not list(certificates.glob("*.json"))


def test_probes_hold_extreme_values(certificates: Path) -> None:
    inputs = dict(vendor_certificate._inputs(HEADS, KV_HEADS, DIM, Q.device))
    v = inputs["extreme"].v.float()
    assert all(x.isfinite().all() for kind in inputs.values() for x in kind)
    assert v.abs().max() > 9e29
    assert inputs["extreme"].k.abs().max() > 900
    assert ((v == 0) & torch.signbit(v)).any()
    assert ((v != 0) & (v.abs() < 2.0**-126)).any()
    assert inputs["wide-ranging"].v.abs().max() > 1e5


# What the library is told: a stand-in that reads keys as it does, and multiplies what it masks by 0.


def _library(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, q_starts: torch.Tensor, most_rows: int, most_keys: int,
    k_starts: torch.Tensor | None = None, lengths: torch.Tensor | None = None, table: torch.Tensor | None = None,
) -> Pair:  # fmt: skip
    assert all(x is None or x.dtype == torch.int32 for x in (q_starts, k_starts, lengths, table))
    if table is not None:
        assert lengths is not None
        cache = torch.cat((k, v), dim=3).transpose(1, 2).contiguous()
        return cpu.paged_attention(q, cache, table, q_starts.long(), lengths.long(), scale, TILE, 0), torch.empty(0)
    assert k_starts is not None
    counts = (k_starts.diff() if lengths is None else lengths).tolist()
    segments, wrong = [], torch.zeros(len(q))
    for first, end, key, count in zip(q_starts.tolist(), q_starts[1:].tolist(), k_starts.tolist(), counts):
        segments.append(Segment(first, end - first, count - (end - first), key, count))
        tile_end = key + -(-count // 128) * 128
        wrong[first:end] = 0 * v[key + count : tile_end].float().sum()
    out, lse2 = cpu.forward(q, k, v, torch.tensor(segments), scale, TILE, 0)
    return out + wrong[:, None, None].bfloat16(), lse2.T / math.log2(math.e)


def _place(k: torch.Tensor, v: torch.Tensor, places: torch.Tensor, blocks: int) -> Pair:
    copies = torch.full((2, 128 * blocks, *k.shape[1:]), 0.0, dtype=k.dtype)
    for first, count, block in places.tolist():
        for copy, rows in zip(copies, (k, v)):
            copy[128 * block : 128 * block + count] = rows[first : first + count]
    return copies[0], copies[1]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(vendor.LIBRARY), "available", True)
    monkeypatch.setattr(vendor.LIBRARY, "forward", _library)
    monkeypatch.setitem(vendor.LIBRARY.__dict__, "kernel_id", "vendor:attention:0123456789ab")
    monkeypatch.setattr(vendor, "certify", lambda *arguments: None)
    monkeypatch.setattr(vendor_rows, "place_rows", _place)
    reset_readback()


def _make(rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(rows, h, DIM, generator=generator).bfloat16() for h in (HEADS, KV_HEADS, KV_HEADS))
    return q, k, v


@pytest.mark.parametrize("lengths", [(70,), (70, 1, 0, 129, 33), (0, 5)])
def test_packed_sequences_reach_the_library_apart(library: None, lengths: tuple[int, ...]) -> None:
    q, k, v = _make(sum(lengths))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    out, lse2 = vendor.whole(q, k, v, cu, SCALE)
    expected, expected_lse2 = _whole(q, k, v, cu, SCALE)
    assert torch.equal(out, expected)
    torch.testing.assert_close(lse2, expected_lse2, atol=1e-6, rtol=1e-6)
    if len(lengths) > 2:
        v[: lengths[0]], v[sum(lengths[:4]) :] = math.nan, math.nan
        assert torch.equal(vendor.whole(q, k, v, cu, SCALE)[0][lengths[0] : sum(lengths[:4])], expected[lengths[0] : sum(lengths[:4])])


def test_one_unaligned_sequence_is_copied(library: None) -> None:
    q, k, v = _make(40)
    view = torch.zeros(40, KV_HEADS, DIM + 1).bfloat16()
    view[..., :DIM] = k
    cu = torch.tensor([0, 40])
    assert torch.equal(vendor.whole(q, view[..., :DIM], v, cu, SCALE)[0], _whole(q, k, v, cu, SCALE)[0])


def test_owned_queries_see_the_keys_up_to_their_own(library: None) -> None:
    q, k, v = _make(100)
    segments = [Segment(0, 10, 0, 0, 40), Segment(10, 7, 33, 0, 40), Segment(17, 60, 0, 40, 60)]
    own = torch.cat((torch.arange(10), torch.arange(33, 40), torch.arange(40, 100)))
    out, lse2 = vendor.forward(q[own], k, v, torch.tensor(segments), SCALE, TILE, 0)
    expected, expected_lse2 = _owned(q[own], k, v, torch.tensor(segments), SCALE)
    assert torch.equal(out, expected)
    torch.testing.assert_close(lse2, expected_lse2, atol=1e-6, rtol=1e-6)
    assert [(ran.op, ran.backend) for ran in readback() if ran.backend == "vendor"] == [("attention", "vendor")]
    assert context._FORWARD["vendor"] is vendor.forward


def test_pages_of_both_layouts_reach_the_library(library: None) -> None:
    q, k, v = _make(33)
    cache = torch.full((4, KV_HEADS, 16, 2 * DIM), math.nan).bfloat16()
    for at in range(33):
        cache[3 - at // 16, :, at % 16] = torch.cat((k[at], v[at]), dim=-1)
    table, starts, ends = torch.tensor([[3, 2, 1, 2**31 - 1]], dtype=torch.int32), torch.tensor([0, 5]), torch.tensor([33])
    for pages in (cache, cache.transpose(1, 2).contiguous().transpose(1, 2)):
        out = vendor.paged_attention(q[28:], pages, table, starts, ends, SCALE, TILE, 0)
        assert torch.equal(out, _whole(q, k, v, torch.tensor([0, 33]), SCALE)[0][28:])
    assert vendor.paged_attention(q[:0], cache, table, starts[:1].repeat(2), ends, SCALE, TILE, 0).shape == (0, HEADS, DIM)
    with pytest.raises(ValueError, match=r"cannot read kv_cache with strides .*lay it out as \[blocks, Hk, page, 2·D\]"):
        vendor.paged_attention(q, torch.zeros(4, KV_HEADS, 16, 2 * DIM + 1).bfloat16()[..., 1:], table, starts, ends, SCALE, TILE, 0)


def test_pages_are_certified_ahead_of_a_capture(library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[int, ...], int, int | None]] = []
    monkeypatch.setattr(vendor, "certify", lambda q, kv_heads, page, calls: asked.append((tuple(q.shape), kv_heads, page)))
    vendor.certify_pages(HEADS, KV_HEADS, DIM, 64, Q.device)
    q, k, v = _make(1)
    cache = torch.cat((k, v), dim=-1)[:, :, None].expand(1, KV_HEADS, 64, 2 * DIM).contiguous()
    one = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1]), torch.tensor([1])
    vendor.paged_attention(q, cache, *one, SCALE, TILE, 0)
    assert [(heads, *rest) for (_, heads, _), *rest in asked] == [(HEADS, KV_HEADS, 64)] * 2


def test_what_the_family_does_not_have_is_refused(library: None) -> None:
    q, k, v = _make(4)
    with pytest.raises(ValueError, match=r"use kv_split=0 \(attention_family vendor-one-split\), not 64"):
        vendor.forward(q, k, v, torch.tensor([Segment(0, 4, 0, 0, 4)]), SCALE, TILE, 64)
    with pytest.raises(BackendUnavailable, match="heads of a multiple of 8, not 12"):
        vendor.forward(q[..., :12], k[..., :12], v[..., :12], torch.tensor([Segment(0, 4, 0, 0, 4)]), SCALE, TILE, 0)


def test_without_the_library_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = _make(4)
    monkeypatch.setitem(vendor.LIBRARY.__dict__, "path", None)
    with pytest.raises(BackendUnavailable, match=r"FlashAttention 3 of a vLLM for CUDA: install rlk\[cuda\]"):
        vendor.forward(q, k, v, torch.tensor([Segment(0, 4, 0, 0, 4)]), SCALE, TILE, 0)


@pytest.mark.parametrize("available", [True, False])
def test_its_cells_have_a_test_only_where_the_library_is(monkeypatch: pytest.MonkeyPatch, available: bool) -> None:
    """Elsewhere nothing judges them: they are MISSING."""
    monkeypatch.setattr(type(vendor.LIBRARY), "available", available)
    found = importlib.util.spec_from_file_location("cells_of_ws1", Path(__file__).parents[1] / "acceptance" / "test_ws1.py")
    assert found is not None
    assert found.loader is not None
    cells = importlib.util.module_from_spec(found)
    found.loader.exec_module(cells)
    covered = [mark.kwargs for function in vars(cells).values() for mark in getattr(function, "pytestmark", [])]
    assert ({"scope": "ws1", "backend": "vendor", "subject": "attention"} in covered) is available


def test_what_a_card_said_is_kept() -> None:
    record = json.loads((Path(__file__).parents[1] / "benchmarks" / "results" / "vendor_attention_h200.json").read_text())
    checks = record["checks"]
    assert all(check["ok"] and check["cases"] for check in checks.values())
    assert {f"cuda/ws1/attention/{tier}-vendor/{j}" for tier in ("short", "primary") for j in FORWARD} <= set(checks)
    assert checks["planted: decode with automatic splits"]["differing"] > 0
    assert {"planted: automatic splits in the cells", "planted: three splits, packed", "planted: automatic splits, pages of 16"} <= set(
        checks
    )
    assert checks["decode = prefill, lengths 1–300, alone"]["cases"] == 600
    assert record["certificate"]["vendor"] in record["kernels"]
    assert "32 query heads, 8 kv heads, 128 wide, packed" in record["certificate"]["certified"]
    for name, arms in record["times"].items():
        assert all(low <= arm["median_us"] <= high for arm in arms.values() for low, high in [arm["quartiles_us"]]), name


# The copies


def test_every_row_is_copied_to_its_place() -> None:
    script = Path(__file__).with_name("interpreted_vendor_rows.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.endswith("every row is in its place\n")


def test_the_copy_compiles_for_a_card() -> None:
    with torch.device("meta"), recorded("cuda") as asked:
        k = torch.empty(4096, 8, 128, dtype=torch.bfloat16)
        vendor_rows.place_rows(k, k, torch.empty(8, 3, dtype=torch.int64), 40)
    (launch,) = asked
    compiled = compile_launch(launch, "cuda:90")
    assert compiled.spills == 0
