"""Where a benchmark ran, as far as its figures depend on it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlk.evidence.environment import freeze
from rlk.evidence.provenance import read_provenance

ROOT = Path(__file__).resolve().parents[2]


def where() -> dict[str, Any]:
    """Day, commit, card, driver and versions."""
    source, found = read_provenance(ROOT), freeze(ROOT)
    kept = {name: found[name] for name in ("python", "cpu", "cores", "cuda", "packages", "gpus")}
    return {"date": f"{datetime.now(UTC):%Y-%m-%d}", "commit": source.sha, "dirty": source.dirty, **kept}
