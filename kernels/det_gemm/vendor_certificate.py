"""Certification of cuBLASLt: a product may be used once its bytes equal the canonical chain's on probe inputs of the very same problem.

A problem is everything that the library's choice of a kernel can depend on: sizes, strides, alignments and the type of the result. What
was certified is kept per card, driver and library version, so that a process starts where the last one ended.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from rlk.kernels.certificate import Certificates, VendorNotCertified, card

Multiply = Callable[[torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor]
_MOST_ALIGNED = 256
"""Bytes beyond which the library asks for no alignment."""
_SEED = 20_011


class VendorLibrary:
    """cuBLASLt as the torch build in use loads it.

    ``kernel_id`` is ``vendor:det_gemm:<first 12 hex digits of a hash>``, over this source and the versions of library and torch.
    """

    files = tuple(sorted(Path(__file__).parent.glob("vendor*.py")))

    @property
    def available(self) -> bool:
        """Whether this torch build holds the library."""
        return torch.version.cuda is not None

    @functools.cached_property
    def version(self) -> int:
        """Of the library that is loaded, not of a package that says so."""
        major = str(torch.version.cuda).split(".")[0]
        ask = ctypes.CDLL(f"libcublasLt.so.{major}").cublasLtGetVersion
        ask.restype = ctypes.c_size_t
        return int(ask())

    @functools.cached_property
    def kernel_id(self) -> str:
        sha = hashlib.sha256(f"cuBLASLt {self.version}, torch {torch.__version__}".encode())
        for path in self.files:
            sha.update(path.read_bytes())
        return f"vendor:det_gemm:{sha.hexdigest()[:12]}"


LIBRARY = VendorLibrary()


def certify(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, multiply: Multiply, quiet: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Return if ``multiply`` has the chain's bytes for problems like a·b; raise VendorNotCertified if one byte differs.

    a: [M, K], b: [K, N], bf16, on the card. The first product of its kind is probed here, which takes a few products' time and makes the
    host wait; under graph capture it is refused instead.
    """
    problem = _problem(a, b, out_dtype)
    if problem in CERTIFICATES.known(a.device.index):
        return
    if _capturing(a):
        raise VendorNotCertified(f"det_gemm: {problem} is not certified: run it once before the graph is captured")
    for kind, (left, right) in _probes(a, b):
        found, expected = quiet(multiply(left, right, out_dtype)), _chain(left, right, out_dtype)
        differing = int((_bits(found) != _bits(expected)).sum())
        if differing:
            raise VendorNotCertified(
                f"det_gemm: cuBLASLt {LIBRARY.version} differs from the canonical chain in {differing} of {found.numel()} elements "
                f"on {kind} inputs of {problem}: use backend 'triton'"
            )
    CERTIFICATES.keep(a.device.index, problem)


def _capturing(x: torch.Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _problem(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> str:
    strides = "x".join(str(s) for x in (a, b) for s in x.stride())
    return (
        f"M{a.shape[0]} K{a.shape[1]} N{b.shape[1]} strides {strides} aligned {_alignment(a)},{_alignment(b)} "
        f"to {str(out_dtype).removeprefix('torch.')}"
    )


def _alignment(x: torch.Tensor) -> int:
    address = x.data_ptr()
    return min(address & -address, _MOST_ALIGNED)


def _probes(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Operands laid out like a and b: normal values, products of very different size, and extreme values in some rows."""
    random = torch.Generator(a.device).manual_seed(_SEED)
    left, right = _like(a), _like(b)
    left.normal_(generator=random)
    right.normal_(generator=random)
    yield "normal", (left, right)
    right *= torch.exp2(torch.randint(-20, 21, (b.shape[0], 1), generator=random, device=a.device)).to(right.dtype)
    yield "wide-ranging", (left, right)
    extremes = (1e-39, -1e-40, 3e38, -3e38, torch.inf, torch.nan, -0.0, 0.0)
    for row, value in enumerate(extremes):
        if row < left.shape[0]:
            left[row, row % left.shape[1] :: 1 + row] = value
    yield "extreme", (left, right)


def _like(x: torch.Tensor) -> torch.Tensor:
    """Unset memory with the strides and the alignment of x."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    shift = _alignment(x) % _MOST_ALIGNED // x.element_size()
    return x.new_zeros(span + shift)[shift:].as_strided(x.shape, x.stride(), shift)


def _chain(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """a·b by one tile of the Triton backend, in plain order; not recorded as run, since it is no operator's result."""
    from rlk.kernels.det_gemm.triton import contract
    from rlk.kernels.det_gemm.triton_tiles import Tile

    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)
    contract(None, a.contiguous(), b.contiguous(), True, 1, out, Tile(64, 64, 64, 4, 3), True)  # type: ignore[arg-type]
    return out


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.element_size() == 2 else torch.int32)


def _where(device: int) -> dict[str, str]:
    """What a certificate holds for: card, driver, library and the source of both sides."""
    from rlk.kernels.det_gemm.triton import SOURCE

    return {
        **card(device),
        "library": f"cuBLASLt {LIBRARY.version}",
        "torch": torch.__version__,
        "vendor": LIBRARY.kernel_id,
        "chain": SOURCE.kernel_id,
        "workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    }


CERTIFICATES = Certificates("det_gemm", _where)
