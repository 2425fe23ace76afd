"""Narrowing a session on purpose: ``--cell``, ``--shard`` and ``--scope``.

A narrowed session never ends PASS. One narrowed by ``--scope`` alone answers a smaller question in full: it exits 0 if every required cell
of those scopes is green, though its verdict over the platform is PARTIAL. ``--shard`` takes a part of the platform, or of the scopes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from rlk.acceptance.cell import Cell


class SelectionError(ValueError):
    """An unknown cell or scope, or a malformed shard; one line with the remedy."""


def select_cells(cells: Sequence[Cell], ids: Sequence[str], shard: str | None, scopes: Sequence[str] = ()) -> tuple[str, ...] | None:
    """Ids to run, or None for all.

    Scopes take all of their required cells. Shard i of n (1-based) takes every n-th required cell, of the scopes if some are named, so that
    shards partition the matrix or the scopes.
    """
    required = [c.cell_id for c in cells if c.required]
    if ids and (shard or scopes):
        raise SelectionError("--cell and --shard or --scope exclude each other: name the cells alone")
    known = tuple(dict.fromkeys(c.scope for c in cells if c.required))
    for scope in scopes:
        if scope not in known:
            raise SelectionError(f"--scope {scope!r} has no required cell on this platform: use one of {', '.join(known)}")
    if scopes:
        required = [c.cell_id for c in cells if c.required and c.scope in scopes]
    for cell_id in ids:
        if cell_id not in required:
            close = difflib.get_close_matches(cell_id, required, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "list them with `rlk plan --cells`"
            raise SelectionError(f"--cell {cell_id!r} is not a required cell of this platform: {hint}")
    if ids:
        return tuple(dict.fromkeys(ids))
    if not shard:
        return tuple(required) if scopes else None
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise SelectionError(f"--shard {shard!r} is not I/N with 1 <= I <= N: use for example 1/4")
    return tuple(required[int(match[1]) - 1 :: int(match[2])])
