"""Waivers: notes on known red cells. They annotate the report and change neither verdict nor exit code."""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from rlk.evidence.schema import Waiver

_LIST = TypeAdapter(list[Waiver])


def load_waivers(path: Path | None, sha: str, today: date, cell_ids: Collection[str]) -> list[Waiver]:
    """Waivers of ``path``, each with a note if it is stale (another commit), expired or void. A bad file becomes one noted waiver."""
    if path is None:
        return []
    try:
        waivers = _LIST.validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        return [Waiver(cell_id="-", sha="-", reason="-", expires="-", note=f"{path.name} is unreadable: {str(error).splitlines()[0]}")]
    return [w.model_copy(update={"note": _note(w, sha, today, cell_ids)}) for w in waivers]


def _note(waiver: Waiver, sha: str, today: date, cell_ids: Collection[str]) -> str:
    if waiver.cell_id not in cell_ids:
        return "void: names no cell of this platform"
    if waiver.sha != sha:
        return "stale: written for another commit"
    try:
        expires = date.fromisoformat(waiver.expires)
    except ValueError:
        return f"void: {waiver.expires!r} is not a date"
    return "expired" if expires < today else ""
