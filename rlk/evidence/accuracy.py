"""The accuracy comparator: |candidate − reference| <= atol + rtol·|reference|, elementwise, in fp64."""

from __future__ import annotations

from typing import Any

import torch

from rlk.contract.judgments import Judgment, operator, tolerance
from rlk.evidence.bytes import digest
from rlk.evidence.schema import Accuracy


def measure_accuracy(name: str, subject: str, value: str, judgment: Judgment, candidate: torch.Tensor, reference: torch.Tensor) -> Accuracy:
    """Measure one output or gradient ``value`` of operator ``subject`` within the contract's tolerance for it.

    candidate: any dtype. reference: fp32, same shape. Never raises on an excess. A differing shape, a reference that is not fp32, no
    element, and a NaN or Inf on either side are problems, and a measurement with a problem has not passed.
    """
    allowed = tolerance(subject, judgment, operator(subject).storage(value))
    dtype = str(candidate.dtype).removeprefix("torch.")
    found: dict[str, Any] = {"name": name, "subject": subject, "value": value, "atol": allowed.atol, "rtol": allowed.rtol}
    found |= {"dtype": dtype, "shape": tuple(candidate.shape), "problem": _problem(candidate, reference)}
    if found["problem"]:
        return Accuracy(**found)
    exact = reference.detach().double()
    error = (candidate.detach().double().to(exact.device) - exact).abs()
    size = exact.abs()
    nonzero = size > 0
    return Accuracy(
        **found,
        elements=exact.numel(),
        max_abs=float(error.max()),
        max_rel=float((error[nonzero] / size[nonzero]).max()) if bool(nonzero.any()) else 0.0,
        worst_excess=float((error - (allowed.atol + allowed.rtol * size)).max()),
        reference_bf16_error=float((reference.detach().bfloat16().double() - exact).abs().max()),
        digest=digest(candidate),
    )


def describe_accuracy(accuracy: Accuracy) -> str:
    """One line for a person."""
    if accuracy.problem:
        return f"{accuracy.name}: {accuracy.problem}"
    return (
        f"{accuracy.name}: off by up to {accuracy.max_abs:.3g} (bf16 rounding alone: {accuracy.reference_bf16_error:.3g}), "
        f"{'within' if accuracy.passed else f'{accuracy.worst_excess:.3g} beyond'} {accuracy.atol:g} + {accuracy.rtol:g}·|reference|"
    )


def _problem(candidate: torch.Tensor, reference: torch.Tensor) -> str:
    if candidate.shape != reference.shape:
        return f"shape {tuple(candidate.shape)} against {tuple(reference.shape)}"
    if reference.dtype != torch.float32:
        return f"the reference is {str(reference.dtype).removeprefix('torch.')}, not float32"
    if not candidate.numel():
        return "nothing to measure: no element"
    bad = int((~torch.isfinite(candidate)).sum()), int((~torch.isfinite(reference)).sum())
    return f"NaN or Inf: {bad[0]} candidate, {bad[1]} reference" if any(bad) else ""
