"""The vendor backend without a card: the orders in which it joins leaves, and what its certification keeps and refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlk.contract.topology import token_leaves
from rlk.kernels.certificate import Certificates, VendorNotCertified
from rlk.kernels.det_gemm import cpu, vendor, vendor_certificate
from rlk.kernels.dispatch import BackendUnavailable, readback, reset_readback

torch.manual_seed(5)
X, W = torch.randn(19, 64).bfloat16(), torch.randn(48, 64).bfloat16()
DY = torch.randn(19, 48).bfloat16()


def _plain(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """A library that adds in plain order: the CPU backend's."""
    return cpu.product("det_gemm", a.contiguous(), b.T.contiguous(), 1, out_dtype)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(vendor, "multiply", _plain)
    monkeypatch.setattr(vendor, "certify", lambda *arguments: None)
    monkeypatch.setitem(vendor.LIBRARY.__dict__, "kernel_id", "vendor:det_gemm:0123456789ab")
    yield
    reset_readback()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_leaves_are_joined_in_split_order(library: None, splits: int, dtype: torch.dtype) -> None:
    assert torch.equal(vendor.product("det_gemm", X, W, splits, dtype), cpu.product("det_gemm", X, W, splits, dtype))
    assert torch.equal(vendor.input_grad("det_gemm", DY.float(), W, splits, dtype), cpu.input_grad("det_gemm", DY, W, splits, dtype))
    assert {ran.backend for ran in readback() if ran.op == "det_gemm"} == {"vendor", "cpu"}


def test_tokens_are_added_in_leaf_order(library: None) -> None:
    leaves = token_leaves((3, 16))
    index, offsets = torch.tensor(leaves.index), torch.tensor(leaves.offsets)
    assert torch.equal(vendor.weight_grad("det_gemm", X, DY, index, offsets), cpu.weight_grad("det_gemm", X, DY, index, offsets))


def test_nan_is_quiet(library: None) -> None:
    x = X.clone()
    x[3, 5] = torch.tensor(-1, dtype=torch.int16).view(torch.bfloat16)  # a NaN of another pattern
    for dtype, view, pattern in ((torch.bfloat16, torch.int16, 0x7FC0), (torch.float32, torch.int32, 0x7FC00000)):
        assert set(vendor.product("det_gemm", x, W, 2, dtype)[3].view(view).tolist()) == {pattern}


def test_widths_that_the_library_cannot_read_aligned_are_refused() -> None:
    with pytest.raises(BackendUnavailable, match="multiples of 8, not 12"):
        vendor.product("det_gemm", torch.ones(4, 12).bfloat16(), torch.ones(8, 12).bfloat16(), 1, torch.float32)


@pytest.fixture
def certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLK_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(vendor_certificate, "CERTIFICATES", Certificates("det_gemm", lambda device: {"card": "none", "driver": "0"}))
    monkeypatch.setattr(vendor_certificate, "_chain", _plain)
    monkeypatch.setitem(vendor_certificate.LIBRARY.__dict__, "version", 130000)
    return tmp_path / "vendor"


def _certify(a: torch.Tensor, b: torch.Tensor, multiply: vendor_certificate.Multiply = _plain) -> None:
    vendor_certificate.certify(a, b, torch.float32, multiply, vendor.quiet)


def test_a_problem_is_probed_once_and_kept(certificates: Path) -> None:
    calls = []

    def counted(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        calls.append(a)
        return _plain(a, b, out_dtype)

    for _ in range(2):
        _certify(X[:16], W.T, counted)
    assert len(calls) == 3
    vendor_certificate.CERTIFICATES.forget()  # as in the next process
    _certify(X[:16], W.T, counted)
    assert len(calls) == 3
    _certify(X[:16, 8:], W[:, 8:].T, counted)
    assert len(calls) == 6
    (file,) = certificates.glob("*.json")
    kept = json.loads(file.read_text())
    assert kept["driver"] == "0"
    assert len(kept["certified"]) == 2


def _other_group_edge(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    a, b = (torch.cat((x.new_zeros(x.shape[0], 1), x), 1) for x in (a.contiguous(), b.T.contiguous()))
    return cpu.product("det_gemm", a, b, 1, out_dtype)


def _split_k(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return cpu.product("det_gemm", a.contiguous(), b.T.contiguous(), 2, out_dtype)


def _loses_nan(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return _plain(a, b, out_dtype).nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)


def _flushes(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return _plain(a.where(a.abs() >= 2.0**-126, 0), b, out_dtype)


@pytest.mark.parametrize("faulty", [_other_group_edge, _split_k, _loses_nan, _flushes])
def test_another_order_is_not_certified(certificates: Path, faulty: vendor_certificate.Multiply) -> None:
    with pytest.raises(VendorNotCertified, match=r"differs from the canonical chain in \d+ of 768 elements"):
        _certify(X[:16], W.T, faulty)
    assert not list(certificates.glob("*.json"))


def test_nothing_is_certified_during_a_capture(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendor_certificate, "_capturing", lambda x: True)
    with pytest.raises(VendorNotCertified, match="before the graph is captured"):
        _certify(X[:16], W.T)


def test_probes_lie_like_the_operands() -> None:
    a, b = X.repeat(1, 2)[:16, 8:72], W.T
    for _, pair in vendor_certificate._probes(a, b):
        for probe, x in zip(pair, (a, b), strict=True):
            assert (probe.shape, probe.stride()) == (x.shape, x.stride())
