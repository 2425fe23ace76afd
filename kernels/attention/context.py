"""Attention of a rank that owns a part of the queries or keys (context parallelism), outside autograd; bytes equal the whole.

Nothing is added across ranks. For the output and dQ a rank owns queries and gathers K and V; for dK and dV it owns keys and gathers
Q, dO, LSE₂ and delta. Reduction orders are those of ``rlk.kernels.attention``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from rlk.kernels._triton import from_triton
from rlk.kernels.attention import cpu, require_packed, require_tiles, vendor
from rlk.kernels.dispatch import Backends, select

_FORWARD: Backends = {"cpu": cpu.forward, "triton": from_triton("attention", "forward"), "vendor": vendor.forward}
_DELTA: Backends = {"cpu": cpu.delta, "triton": from_triton("attention", "delta")}
_QUERY_GRADIENT: Backends = {"cpu": cpu.query_gradient, "triton": from_triton("attention", "query_gradient")}
_KEY_GRADIENT: Backends = {"cpu": cpu.key_gradient, "triton": from_triton("attention", "key_gradient")}


class Segment(NamedTuple):
    """Consecutive owned rows of one sequence.

    row, rows: first row in the owned tensor and how many; position: logical position of the first.
    gathered: row of position 0 in the gathered tensor; length: rows of the sequence in it, at least every visible one.
    """

    row: int
    rows: int
    position: int
    gathered: int
    length: int


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: Sequence[Segment], *,
    scale: float, kv_tile: int, kv_split: int, backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Output [T, Hq, D] bf16 and lse2 [T, Hq] fp32 of owned queries q [T, Hq, D]; k, v: gathered [rows, Hk, D], both bf16.

    segments: every row of q, ascending. Raises ValueError on a wrong shape, dtype, segment, tile or split.
    """
    require_packed("attention", q, k, v)
    require_tiles("attention", kv_tile, kv_split)
    table = _table(segments, q.shape[0], k.shape[0])
    out, lse2 = select("attention", _FORWARD, backend, q.device)(q, k, v, table, scale, kv_tile, kv_split)
    return out, lse2


def delta(out: torch.Tensor, d_out: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Σ dO·O over D by row tree: [T, Hq] fp32 of out, d_out [T, Hq, D] bf16."""
    result: torch.Tensor = select("attention.delta", _DELTA, backend, out.device)(out, d_out)
    return result


def query_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, lse2: torch.Tensor, delta: torch.Tensor,
    segments: Sequence[Segment], *, scale: float, backend: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """dQ [T, Hq, D] bf16 of owned queries; d_out, lse2, delta: of the owned queries; k, v: gathered. segments: as in :func:`attend`."""
    require_packed("attention.backward", q, k, v)
    table = _table(segments, q.shape[0], k.shape[0])
    run = select("attention.backward", _QUERY_GRADIENT, backend, q.device)
    dq: torch.Tensor = run(q, k, v, d_out, lse2, delta, table, scale)
    return dq


def key_gradient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor, lse2: torch.Tensor, delta: torch.Tensor,
    segments: Sequence[Segment], *, scale: float, backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """dK, dV [rows, Hk, D] bf16 of owned keys k, v; q, d_out, lse2, delta: gathered. segments: every row of k, ascending."""
    require_packed("attention.backward", q, k, v)
    table = _table(segments, k.shape[0], q.shape[0])
    dk, dv = select("attention.backward", _KEY_GRADIENT, backend, q.device)(q, k, v, d_out, lse2, delta, table, scale)
    return dk, dv


def _table(segments: Sequence[Segment], owned: int, gathered: int) -> torch.Tensor:
    row = 0
    for s in segments:
        inside = s.position + s.rows <= s.length and 0 <= s.gathered <= gathered - s.length
        if s.row != row or min(s.rows, s.position) < 0 or not inside:
            raise ValueError(f"attention: {s} must start at owned row {row} and lie inside its sequence and {gathered} gathered rows")
        row += s.rows
    if row != owned:
        raise ValueError(f"attention: segments cover {row} of {owned} owned rows")
    return torch.tensor(segments, dtype=torch.int64).reshape(len(segments), 5)
