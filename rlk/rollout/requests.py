"""What every rollout engine does with requests before and after it runs them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlk.contract.records import Request, Response


def require_distinct(requests: Sequence[Request]) -> None:
    """Raise ValueError for a sample id given twice."""
    ids = [request.sample_id for request in requests]
    if len(set(ids)) != len(ids):
        raise ValueError(f"sample id {next(i for i in ids if ids.count(i) > 1)} is given twice: ids name a sample within one call")


def refusal(request: Request, vocab_size: int, max_model_len: int) -> str | None:
    """Why this one sample cannot be generated, None if it can; the rest of its batch is not affected."""
    length, largest = len(request.prompt_ids), max(request.prompt_ids)
    if length >= max_model_len:
        return f"refused: a prompt of {length} tokens leaves no room in a context of {max_model_len}"
    if largest >= vocab_size:
        return f"refused: prompt id {largest} is outside the vocabulary of {vocab_size}"
    return None


def refused_response(request: Request, reason: str, version: int) -> Response:
    """A response without tokens whose finish_reason says why."""
    return Response(request.sample_id, request.prompt_ids, (), (), None, reason, 0, version)


def eos_token_ids(checkpoint: Path) -> tuple[int, ...]:
    """End-of-sequence ids of a checkpoint: generation_config.json, else config.json; none if neither names one."""
    for name in ("generation_config.json", "config.json"):
        path = checkpoint / name
        found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        ids = found.get("eos_token_id")
        if ids is not None:
            return (ids,) if isinstance(ids, int) else tuple(ids)
    return ()
