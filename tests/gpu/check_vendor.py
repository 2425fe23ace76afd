"""Checks the certified vendor products on a card, with no pytest and no install of rlk:

    PYTHONPATH=. python3 tests/gpu/check_vendor.py [section ...]

Writes $OUT/vendor.json and exits 1 if a check failed.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as in an acceptance session

import torch
from report import Report, graphed, main

import rlk.kernels.det_gemm as det_gemm_module
from rlk.acceptance.collector import Evidence
from rlk.acceptance.measure import measure
from rlk.contract.judgments import JUDGMENTS
from rlk.contract.models import QWEN3_8B
from rlk.contract.topology import token_leaves
from rlk.evidence.bytes import describe
from rlk.kernels.batch_invariant_logp import batch_invariant_logp_with_lse
from rlk.kernels.batch_invariant_logp.reference import batch_invariant_logp as specified
from rlk.kernels.det_gemm import det_gemm, det_gemm_input_part, det_gemm_weight_grad, vendor, vendor_certificate
from rlk.kernels.lm_head import lm_head

ROWS = (1, 2, 16, 17, 64, 127, 512, 2048)


def _random(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda").bfloat16()


def products(report: Report) -> None:
    """Every linear layer of Qwen3-8B, its eighths and the logits: the bytes of the Triton backend, forward and backward."""
    torch.manual_seed(0)
    began = time.perf_counter()
    shapes = sorted({(g.n // a, g.k // b) for g in QWEN3_8B.gemms()[:-1] for a, b in ((1, 1), (8, 1), (1, 8))} | {(19072, 4096)})
    for n, k in shapes:
        w = _random(n, k)
        for rows in ROWS:
            x, dy, case = _random(rows, k), _random(rows, n), f"M{rows} K{k} N{n}"
            for splits in (1, 8):
                theirs, ours = (det_gemm(x, w, splits=splits, backend=backend) for backend in ("vendor", "triton"))
                report.same("vendor product", f"{case} splits {splits}", theirs, ours)
                theirs, ours = (det_gemm_input_part(dy, w, splits=splits, backend=backend) for backend in ("vendor", "triton"))
                report.same("vendor input gradient", f"{case} splits {splits}", theirs, ours)
            theirs, ours = (lm_head(x, w, backend=backend) for backend in ("vendor", "triton"))
            report.same("vendor logits", case, theirs, ours)
    leaves = token_leaves((300, 7, 129))
    index, offsets = torch.tensor(leaves.index, device="cuda"), torch.tensor(leaves.offsets, device="cuda")
    for n, k in shapes:
        x, dy = _random(436, k), _random(436, n)
        theirs, ours = (det_gemm_weight_grad(x, dy, index, offsets, backend=backend) for backend in ("vendor", "triton"))
        report.same("vendor weight gradient", f"K{k} N{n}", theirs, ours)
    torch.cuda.synchronize()
    report.holds("vendor products ran", True, seconds=round(time.perf_counter() - began, 1))


def refusals(report: Report) -> None:
    """The default library is not certified where it splits K; nothing is certified during a capture; certified products are captured."""
    torch.manual_seed(0)
    before = torch.backends.cuda.preferred_blas_library(), torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    x, w = _random(16, 12288), _random(4096, 12288)
    faults = {
        "default cuBLAS at 16 rows of down_proj": lambda a, b, dtype: torch.mm(a, b),
        "a group edge moved by one": lambda a, b, dtype: vendor.multiply(
            torch.nn.functional.pad(a.contiguous(), (1, 15)), torch.nn.functional.pad(b.contiguous(), (0, 0, 1, 15)), dtype
        ),
        "NaN lost": lambda a, b, dtype: vendor.multiply(a, b, dtype).nan_to_num_(nan=0.0),
    }
    for name, multiply in faults.items():
        try:
            vendor_certificate.certify(x, w.T, torch.bfloat16, multiply, vendor.quiet)
            report.holds(f"planted: {name}", False)
        except vendor_certificate.VendorNotCertified as error:
            report.holds(f"planted: {name}", True, says=str(error))
    y = det_gemm(x, w, backend="vendor")
    replay, captured = graphed(lambda: det_gemm(x, w, backend="vendor"))
    replay()
    report.same("vendor product in a graph", "M16 K12288 N4096", captured, y)
    after = torch.backends.cuda.preferred_blas_library(), torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    report.holds("library settings put back", before == after, settings=str(after))


def planted(report: Report) -> None:
    """The default library in the place of det_gemm, uncertified: its own cells see it, in the tier where it splits K."""
    judgment = next(j for j in JUDGMENTS if j.name == "forward_invariance")
    table: Any = det_gemm_module._FORWARD
    honest = table["vendor"]
    table["vendor"] = lambda x, w, splits, grad_splits, out_dtype: torch.mm(x, w.T)
    try:
        evidence = Evidence()
        measure("det_gemm", "primary", judgment, "vendor", evidence)
    finally:
        table["vendor"] = honest
    caught = [describe(c) for c in evidence.close().comparisons if not c.equal]
    report.holds(
        "planted: default cuBLAS in the cells of det_gemm", bool(caught), comparisons=len(caught), first=caught[0] if caught else ""
    )


def logits(report: Report) -> None:
    """Errors of logprobs over the whole vocabulary, and those of the fp32 reference, against fp64."""
    for seed in range(4):
        torch.manual_seed(seed)
        h, w = _random(64, 4096), (torch.randn(151936, 4096, device="cuda") / 64).bfloat16()
        ids, temperature = torch.randint(151936, (64,), device="cuda"), torch.ones(64, device="cuda")
        score, lse = batch_invariant_logp_with_lse(
            h, w, ids, temperature, vocab_size=151936, padded_vocab=152576, shards=8, vocab_tile=1024
        )
        single = specified(h, w, ids, temperature, 151936)
        z = h.double() @ w.double().T
        exact_lse = torch.logsumexp(z, 1)
        exact = z.gather(1, ids[:, None])[:, 0] - exact_lse
        rows = {
            "logp": (score, single[0], exact), "lse": (lse, single[1], exact_lse),
            "logits": (lm_head(h, w, grad_splits=1), h.float() @ w.float().T, z),
        }  # fmt: skip
        for name, (ours, reference, truth) in rows.items():
            errors = {who: (x.double() - truth).abs() for who, x in (("ours", ours), ("reference", reference))}
            bias = ((ours.double() - truth) * truth.sign()).mean()
            facts = {f"{who}_max": float(e.max()) for who, e in errors.items()} | {
                f"{who}_mean": float(e.mean()) for who, e in errors.items()
            }
            print(seed, name, {k: f"{v:.3g}" for k, v in facts.items()}, f"bias {float(bias):.3g}", flush=True)
            report.holds(f"errors against fp64, {name}, {seed}", True, **facts, bias=float(bias))


if __name__ == "__main__":
    main("vendor", {"products": products, "refusals": refusals, "planted": planted, "logits": logits})
