"""The byte comparator: raw ``uint8`` views, after shape and dtype; +0 and −0 differ, NaN and Inf void the comparison."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from rlk.evidence.schema import Comparison, Difference

Token = tuple[int, int]
"""(sample id, position in the sample)"""

PIECE = 1 << 24
"""Bytes of a value that are hashed at once."""
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def compare(name: str, actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Compare two tensors byte for byte.

    actual, expected: any equal shape and dtype, any layout (views are made contiguous first; shape is checked before). Two tensors of one
    device are compared there, others on the CPU.
    Returns a Comparison; never raises on a mismatch. A differing shape or dtype, an empty tensor, one memory on both sides, and a NaN
    or Inf on either side are problems, and a comparison with a problem is not equal.
    """
    problem = _incomparable(actual, expected)
    if problem:
        return _void(name, actual, problem)
    there = actual.device if actual.device == expected.device else torch.device("cpu")
    a, b = _flat(actual, there), _flat(expected, there)
    a_bytes, b_bytes = (t.view(torch.uint8).reshape(len(t), -1) for t in (a, b))
    differs = a_bytes != b_bytes
    rows = torch.empty(0, dtype=torch.int64) if torch.equal(a_bytes, b_bytes) else differs.any(dim=1).nonzero().flatten()
    first, max_ulp = None, None
    if len(rows):
        at = int(rows[0])
        ulps = _ulp_distances(a[rows].cpu(), b[rows].cpu()) if a.is_floating_point() else None
        max_ulp = None if ulps is None else int(ulps.max())
        first = Difference(
            index=tuple(int(i) for i in np.unravel_index(at, actual.shape)),
            actual_hex=_hex(a_bytes[at]),
            expected_hex=_hex(b_bytes[at]),
            ulp=None if ulps is None else int(ulps[0]),
        )
    problem = _nonfinite(a, b)
    return Comparison(
        name=name,
        dtype=_name(actual.dtype),
        shape=tuple(actual.shape),
        elements=len(a),
        mismatched_elements=len(rows),
        mismatched_bytes=int(differs.sum()),
        max_ulp=max_ulp,
        first=first,
        problem=problem,
        digest="" if len(rows) or problem else digest(actual),
    )


def digest(value: torch.Tensor) -> str:
    """SHA-256 in hex over dtype and shape, then over the SHA-256 of each 16 MiB piece of the raw bytes in element order.

    value: any device and layout. Pieces come to the host and are hashed several at once, since a trace or a gradient has gigabytes.
    """
    sha = hashlib.sha256(f"{_name(value.dtype)} {list(value.shape)}\n".encode())
    pieces = _flat(value, value.device).view(torch.uint8).split(PIECE)
    if len(pieces) == 1:
        sha.update(_sha256(pieces[0]))
        return sha.hexdigest()
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for found in pool.map(_sha256, pieces):
            sha.update(found)
    return sha.hexdigest()


def compare_fp32(name: str, actual: Sequence[float], expected: Sequence[float]) -> Comparison:
    """Compare two lists of exact fp32 values (logprobs that travelled as plain data)."""
    return compare(name, torch.tensor(actual, dtype=torch.float32), torch.tensor(expected, dtype=torch.float32))


def compare_tokens(
    name: str, actual_tokens: Sequence[Token], actual: torch.Tensor, expected_tokens: Sequence[Token], expected: torch.Tensor
) -> Comparison:
    """Compare rows that belong to tokens, aligned by (sample id, position) whatever order each side holds them in.

    actual, expected: [tokens, ...], one row per entry of their list of tokens. A token that one side lacks or has twice is a problem.
    The first difference is given at (sample id, position, rest of the coordinate).
    """
    problem = _misaligned(actual_tokens, len(actual), expected_tokens, len(expected))
    if problem:
        return _void(name, actual, problem)
    aligned = compare(name, *(rows[_places(tokens)] for tokens, rows in ((actual_tokens, actual), (expected_tokens, expected))))
    if aligned.first is None:
        return aligned
    row, *rest = aligned.first.index
    first = aligned.first.model_copy(update={"index": (*sorted(actual_tokens)[row], *rest)})
    return aligned.model_copy(update={"first": first})


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
    distance = "" if first.ulp is None else f", {first.ulp} ulp, max {comparison.max_ulp} ulp"
    return f"{line}, first at {list(first.index)}: {first.actual_hex} against {first.expected_hex}{distance}"


def _sha256(raw: torch.Tensor) -> bytes:
    return hashlib.sha256(raw.cpu().numpy().data).digest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _void(name: str, actual: torch.Tensor, problem: str) -> Comparison:
    shape, dtype = tuple(actual.shape), _name(actual.dtype)
    return Comparison(name=name, dtype=dtype, shape=shape, elements=0, mismatched_elements=0, mismatched_bytes=0, problem=problem)


def _incomparable(actual: torch.Tensor, expected: torch.Tensor) -> str:
    if actual.shape != expected.shape:
        return f"shape {tuple(actual.shape)} against {tuple(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"dtype {_name(actual.dtype)} against {_name(expected.dtype)}"
    if not actual.numel():
        return "nothing to compare: no element"
    if actual.device == expected.device and actual.data_ptr() == expected.data_ptr():
        return "both sides are the same memory: a value was compared with itself"
    return ""


def _misaligned(actual: Sequence[Token], actual_rows: int, expected: Sequence[Token], expected_rows: int) -> str:
    for side, tokens, rows in (("actual", actual, actual_rows), ("expected", expected, expected_rows)):
        if len(tokens) != rows:
            return f"{rows} rows for {len(tokens)} tokens on the {side} side"
        twice = [token for token, count in Counter(tokens).items() if count > 1]
        if twice:
            return f"sample {twice[0][0]} position {twice[0][1]} is twice on the {side} side"
    for side, absent in (("actual", set(expected) - set(actual)), ("expected", set(actual) - set(expected))):
        if absent:
            sample, position = min(absent)
            return f"{len(absent)} tokens are missing on the {side} side, first sample {sample} position {position}"
    return ""


def _places(tokens: Sequence[Token]) -> torch.Tensor:
    return torch.tensor(sorted(range(len(tokens)), key=lambda row: tokens[row]), dtype=torch.int64)


def _flat(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Elements in order, in memory: lazy conjugates and negations are carried out, or their bytes would not be seen."""
    flat = t.detach().to(device).resolve_conj().resolve_neg().contiguous().flatten()
    return flat.as_strided(flat.shape, (1,))  # one element counts as contiguous at any stride


def _nonfinite(a: torch.Tensor, b: torch.Tensor) -> str:
    if not (a.is_floating_point() or a.is_complex()):
        return ""
    bad = [int((~torch.isfinite(t.float() if t.element_size() == 1 else t)).sum()) for t in (a, b)]
    return f"NaN or Inf: {bad[0]} actual, {bad[1]} expected" if any(bad) else ""


def _hex(raw: torch.Tensor) -> str:
    return bytes(raw.tolist()[::-1]).hex()


def _ulp_distances(a: torch.Tensor, b: torch.Tensor) -> npt.NDArray[np.unsignedinteger]:
    """Distance in units in the last place per element; −0 and +0 are one apart from each other."""
    keys = []
    for t in (a, b):
        bits = t.view(_SIGNED[t.element_size()]).numpy().view(f"u{t.element_size()}")
        sign = bits.dtype.type(1 << (8 * t.element_size() - 1))
        keys.append(np.where(bits & sign, ~bits, bits | sign))
    return np.maximum(*keys) - np.minimum(*keys)
