"""Narrowing a session on purpose: ``--cell`` and ``--shard``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from rlk.acceptance.cell import Cell


class SelectionError(ValueError):
    """An unknown cell or a malformed shard; one line with the remedy."""


def select_cells(cells: Sequence[Cell], ids: Sequence[str], shard: str | None) -> tuple[str, ...] | None:
    """Ids to run, or None for all. Shard i of n (1-based) takes every n-th required cell, so that shards partition the matrix."""
    required = [c.cell_id for c in cells if c.required]
    if ids and shard:
        raise SelectionError("--cell and --shard exclude each other: use one")
    for cell_id in ids:
        if cell_id not in required:
            close = difflib.get_close_matches(cell_id, required, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "list them with `rlk plan --cells`"
            raise SelectionError(f"--cell {cell_id!r} is not a required cell of this platform: {hint}")
    if ids:
        return tuple(dict.fromkeys(ids))
    if not shard:
        return None
    match = re.fullmatch(r"(\d+)/(\d+)", shard)
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise SelectionError(f"--shard {shard!r} is not I/N with 1 <= I <= N: use for example 1/4")
    return tuple(required[int(match[1]) - 1 :: int(match[2])])
