"""The byte comparator: raw ``uint8`` views, after shape and dtype; +0 and −0 differ, NaN and Inf void the comparison."""

from __future__ import annotations

import torch

from rlk.evidence.schema import Comparison, Difference

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare(name: str, actual: torch.Tensor, expected: torch.Tensor, *, allow_nonfinite: bool = False) -> Comparison:
    """Compare two tensors byte for byte.

    actual, expected: any equal shape and dtype, any layout (views are made contiguous first; shape is checked before).
    Returns a Comparison; never raises on a mismatch. A differing shape or dtype, an empty tensor, and a NaN or Inf on either side
    (unless ``allow_nonfinite``) are problems, and a comparison with a problem is not equal.
    """
    shape, dtype = tuple(actual.shape), str(actual.dtype).removeprefix("torch.")
    void = Comparison(name=name, dtype=dtype, shape=shape, elements=0, mismatched_elements=0, mismatched_bytes=0)
    if shape != tuple(expected.shape):
        return void.model_copy(update={"problem": f"shape {shape} against {tuple(expected.shape)}"})
    if actual.dtype != expected.dtype:
        return void.model_copy(update={"problem": f"dtype {dtype} against {str(expected.dtype).removeprefix('torch.')}"})
    if not actual.numel():
        return void.model_copy(update={"problem": "nothing to compare: no element"})
    a, b = (t.detach().cpu().contiguous() for t in (actual, expected))
    problem = "" if allow_nonfinite else _nonfinite(a, b)
    width = a.element_size()
    a_bytes, b_bytes = (t.view(torch.uint8).reshape(-1, width) for t in (a, b))
    differs = a_bytes != b_bytes
    rows = differs.any(dim=1).nonzero().flatten()
    if not len(rows):
        return void.model_copy(update={"elements": a.numel(), "problem": problem})
    ulps = _ulp_distances(a, b, rows)
    at = int(rows[0])
    first = Difference(
        index=tuple(int(i) for i in torch.unravel_index(rows[0], a.shape)),
        actual_hex=_hex(a_bytes[at]),
        expected_hex=_hex(b_bytes[at]),
        ulp=ulps[0] if ulps else None,
    )
    return void.model_copy(
        update={
            "elements": a.numel(),
            "mismatched_elements": len(rows),
            "mismatched_bytes": int(differs.sum()),
            "max_ulp": max(ulps) if ulps else None,
            "first": first,
            "problem": problem,
        }
    )


def compare_fp32(name: str, actual: list[float], expected: list[float]) -> Comparison:
    """Compare two lists of exact fp32 values (logprobs that travelled as plain data)."""
    return compare(name, torch.tensor(actual, dtype=torch.float32), torch.tensor(expected, dtype=torch.float32))


def describe(comparison: Comparison) -> str:
    """One line for a person: counts, first coordinate, both values in hex, ULP distance."""
    if comparison.problem:
        return f"{comparison.name}: {comparison.problem}"
    if comparison.equal:
        return f"{comparison.name}: {comparison.elements} elements, 0 mismatched bytes"
    line = (
        f"{comparison.name}: {comparison.mismatched_elements} of {comparison.elements} elements differ "
        f"({comparison.mismatched_bytes} bytes)"
    )
    if comparison.first is None:
        return line
    first = comparison.first
    values = f"{first.actual_hex} against {first.expected_hex}"
    return f"{line}, first at {list(first.index)}: {values}, {first.ulp} ulp, max {comparison.max_ulp} ulp"


def _nonfinite(a: torch.Tensor, b: torch.Tensor) -> str:
    if not a.is_floating_point():
        return ""
    bad = int((~torch.isfinite(a)).sum()), int((~torch.isfinite(b)).sum())
    return f"NaN or Inf: {bad[0]} actual, {bad[1]} expected" if any(bad) else ""


def _hex(raw: torch.Tensor) -> str:
    return bytes(raw.tolist()[::-1]).hex()


def _ulp_distances(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> list[int]:
    """Distance in units in the last place per differing element; −0 and +0 are one apart from each other."""
    if not a.is_floating_point():
        return []
    integer, bits = _INTEGER[a.element_size()], 8 * a.element_size()
    distances = []
    for x, y in zip(*(t.flatten()[rows].view(integer).tolist() for t in (a, b))):
        keys = [v if v >= 0 else -(v + (1 << (bits - 1))) - 1 for v in (x, y)]
        distances.append(abs(keys[0] - keys[1]))
    return distances
