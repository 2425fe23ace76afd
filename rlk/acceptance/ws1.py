"""The operator scope: twelve operators × tier × four judgments × kernel backend, enumerated from the contract."""

from __future__ import annotations

from collections.abc import Iterator

from rlk.acceptance.cell import Cell
from rlk.acceptance.platforms import Platform
from rlk.contract.judgments import JUDGMENTS, OPERATORS, Judgment
from rlk.contract.operators import THREADS, TIERS, Tier, evidence_names

BACKENDS = ("cpu", "triton", "vendor")
SIDE = "operator"

FORWARD_KERNELS: dict[str, tuple[str, ...]] = {"attention": ("attention", "attention.paged"), "pack": ("pack", "pack.unpack")}
"""What must have run for a forward judgment, where it is not the operator's own name alone."""
GRADIENT_KERNELS: dict[str, tuple[str, ...]] = {
    "embedding": ("embedding.weight_grad",),
    "rms_norm": ("rms_norm.backward", "rms_norm.gamma_grad"),
    "qk_norm": ("qk_norm.backward", "qk_norm.gamma_grad"),
    "det_gemm": ("det_gemm.input_grad", "det_gemm.weight_grad"),
    "rope": ("rope.backward",),
    "attention": ("attention.delta", "attention.backward"),
    "silu": ("silu.backward",),
    "swiglu": ("swiglu.backward",),
    "lm_head": ("lm_head.input_grad", "lm_head.weight_grad"),
    "logp": ("logp.backward",),
    "batch_invariant_logp": ("batch_invariant_logp.input_grad", "batch_invariant_logp.weight_grad"),
    "pack": ("pack", "pack.unpack"),
}
"""What must have run for a gradient judgment."""

VENDOR = {"det_gemm": True, "lm_head": True, "attention": False}
"""Operators that a certified vendor library computes in the contract's order, and whether it has their gradients too."""


def ws1_cells(platform: Platform) -> Iterator[Cell]:
    """Every operator cell of one platform, operators in the order of the contract; impossible ones with their reason."""
    for op in OPERATORS:
        for tier in TIERS:
            for backend in BACKENDS:
                for judgment in JUDGMENTS:
                    yield _cell(platform, op.name, tier, backend, judgment)


def _cell(platform: Platform, name: str, tier: Tier, backend: str, judgment: Judgment) -> Cell:
    kernels = GRADIENT_KERNELS[name] if judgment.gradient else FORWARD_KERNELS.get(name, (name,))
    if name == "attention" and not judgment.exact:
        kernels = tuple(kernel for kernel in kernels if kernel != "attention.paged")  # accuracy is judged on packed sequences
    return Cell(
        platform,
        "ws1",
        name,
        f"{tier}-{backend}",
        judgment.name,
        expect="equal" if judgment.exact else "close",
        strict=tuple((SIDE, kernel) for kernel in kernels),
        names=tuple(n for n in evidence_names(name, tier, judgment) if platform == "cpu" or not n.endswith(f"/{THREADS}")),
        backend=backend,
        unsupported=_why_not(platform, name, backend, judgment),
    )


def _why_not(platform: Platform, name: str, backend: str, judgment: Judgment) -> str:
    if platform == "cpu":
        return {"triton": "Triton kernels run on a GPU", "vendor": "vendor libraries run on a GPU"}.get(backend, "")
    if backend == "cpu":
        return "the cpu backend runs on CPU tensors and is judged on the cpu platform"
    if backend == "triton":
        return ""
    if platform == "rocm":
        return "no vendor library is certified on gfx942"
    if name not in VENDOR:
        return "no vendor library computes this operator in the contract's order"
    if judgment.gradient and not VENDOR[name]:
        return "the vendor library has no backward pass: gradients of its family are the triton backend's kernels, judged there"
    return ""
