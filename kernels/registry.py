"""Every kernel id that this source tree declares, so that a reported id can be checked against the sources."""

from __future__ import annotations

from rlk.kernels._triton import TritonSource
from rlk.kernels.attention.cpu import LIBRARY as ATTENTION
from rlk.kernels.attention.sm90 import BACKWARD as HOPPER_GRADIENTS
from rlk.kernels.attention.sm90 import FORWARD as HOPPER_ATTENTION
from rlk.kernels.attention.vendor_library import LIBRARY as FLASH_ATTENTION
from rlk.kernels.batch_invariant_logp.cpu import LIBRARY as BATCH_INVARIANT_LOGP
from rlk.kernels.det_gemm.cpu import LIBRARY as DET_GEMM
from rlk.kernels.det_gemm.sm90 import SOURCE as HOPPER_PRODUCTS
from rlk.kernels.det_gemm.sm90_tokens import SOURCE as HOPPER_WEIGHT_GRADIENTS
from rlk.kernels.det_gemm.vendor import LIBRARY as CUBLASLT
from rlk.kernels.embedding.cpu import LIBRARY as EMBEDDING
from rlk.kernels.logp.cpu import LIBRARY as LOGP
from rlk.kernels.pack.cpu import LIBRARY as PACK
from rlk.kernels.rms_norm.cpu import LIBRARY as RMS_NORM
from rlk.kernels.rms_norm.sm90 import SOURCE as HOPPER_NORMS
from rlk.kernels.rope.cpu import LIBRARY as ROPE
from rlk.kernels.sampling.sm90 import SOURCE as HOPPER_SAMPLING
from rlk.kernels.serving.sm90 import SOURCE as HOPPER_SERVING
from rlk.kernels.silu.cpu import LIBRARY as SILU
from rlk.kernels.swiglu.cpu import LIBRARY as SWIGLU

_OPERATORS = {
    ATTENTION: ("attention",),
    BATCH_INVARIANT_LOGP: ("batch_invariant_logp",),
    DET_GEMM: ("det_gemm", "lm_head", "batch_invariant_logp"),
    EMBEDDING: ("embedding",),
    LOGP: ("logp",),
    PACK: ("pack",),
    RMS_NORM: ("rms_norm", "qk_norm"),
    ROPE: ("rope",),
    SILU: ("silu",),
    SWIGLU: ("swiglu",),
}
_TRITON = {library.op: operators for library, operators in _OPERATORS.items()} | {
    "logp": ("logp", "batch_invariant_logp"),
    "serving": ("serving", "qk_norm", "rope", "rms_norm"),
    "sampling": ("sampling",),
    "update": ("update",),
}
"""As on the CPU, but for four: there batch_invariant_logp has its own source of logp's arithmetic, serving and update are their
compositions, and sampling is numpy."""


def declared_kernels() -> dict[str, tuple[str, ...]]:
    """Kernel id → operators that may report it on this machine. Nothing is built.

    CPU ids are computed from source, flags, compiler and CPU, Triton ids from source and options, those of vendor libraries from source and
    version where they are installed, those in CUDA C++ from source and flags; operators share the same sources in all of them.
    """
    cpu = {library.kernel_id: operators for library, operators in _OPERATORS.items()}
    triton = {TritonSource(op).kernel_id: operators for op, operators in _TRITON.items()}
    cuda = {
        HOPPER_PRODUCTS.kernel_id: _OPERATORS[DET_GEMM],
        HOPPER_WEIGHT_GRADIENTS.kernel_id: _OPERATORS[DET_GEMM],
        HOPPER_NORMS.kernel_id: _OPERATORS[RMS_NORM],
        HOPPER_SAMPLING.kernel_id: ("sampling",),
        HOPPER_SERVING.kernel_id: ("rms_norm",),
        HOPPER_ATTENTION.kernel_id: _OPERATORS[ATTENTION],
        HOPPER_GRADIENTS.kernel_id: _OPERATORS[ATTENTION],
    }
    vendor: dict[str, tuple[str, ...]] = {CUBLASLT.kernel_id: ("det_gemm", "lm_head")} if CUBLASLT.available else {}
    vendor |= {FLASH_ATTENTION.kernel_id: ("attention",)} if FLASH_ATTENTION.available else {}
    return cpu | triton | cuda | vendor
