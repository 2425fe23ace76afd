"""What travels between the engines and the loop: plain values, checked once when they are built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from operator import lt
from typing import Any

from rlk.contract.numerics import ContractError, round_fp32
from rlk.contract.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """One sample to generate. prompt_ids: token ids, at least one."""

    sample_id: int
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams

    def __post_init__(self) -> None:
        _require_ids(f"request {self.sample_id}", "prompt_ids", self.prompt_ids)

    @classmethod
    def from_plain(cls, row: Mapping[str, Any]) -> Request:
        """Inverse of ``dataclasses.asdict``, also after a journey through JSON."""
        return cls(row["sample_id"], tuple(row["prompt_ids"]), SamplingParams(**row["sampling"]))


@dataclass(frozen=True)
class Response:
    """One generated sample.

    token_ids: response tokens, possibly none (a refused or empty response, which the loop reports).
    logprobs: natural logarithm per response token, each an exact fp32 value.
    support: retained ids per response token, ascending, None when sampling did not truncate. finish_reason: the engine's word.
    cached_tokens: prompt tokens served from the prefix cache. weight_version: version of the weights that generated it.
    Raises ContractError on a missing or misaligned token, a non-finite or wider logprob, or a token outside its support.
    """

    sample_id: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    support: tuple[tuple[int, ...], ...] | None
    finish_reason: str
    cached_tokens: int
    weight_version: int

    def __post_init__(self) -> None:
        who = f"response {self.sample_id}"
        _require_ids(who, "prompt_ids", self.prompt_ids)
        _require_non_negative(who, "token_ids", self.token_ids)
        if len(self.logprobs) != len(self.token_ids):
            raise ContractError(f"{who}: {len(self.logprobs)} logprobs for {len(self.token_ids)} tokens: hand over one per token")
        for position, value in enumerate(self.logprobs):
            if not math.isfinite(value) or round_fp32(value) != value:
                raise ContractError(
                    f"{who}: logprob {value!r} at token {position} is not a finite fp32 value: hand over the kernel's result"
                )
        if self.support is not None:
            _require_support(who, self.token_ids, self.support)

    @classmethod
    def from_plain(cls, row: Mapping[str, Any]) -> Response:
        """Inverse of ``dataclasses.asdict``, also after a journey through JSON."""
        lists = {name: tuple(row[name]) for name in ("prompt_ids", "token_ids", "logprobs")}
        support = row["support"]
        return cls(**{**row, **lists, "support": None if support is None else tuple(tuple(kept) for kept in support)})

    @property
    def length(self) -> int:
        """Prompt and response tokens together."""
        return len(self.prompt_ids) + len(self.token_ids)


def _require_ids(who: str, name: str, ids: tuple[int, ...]) -> None:
    if not ids:
        raise ContractError(f"{who}: {name} is empty: give at least one token")
    _require_non_negative(who, name, ids)


def _require_non_negative(who: str, name: str, ids: tuple[int, ...]) -> None:
    if ids and min(ids) < 0:
        raise ContractError(f"{who}: {name} holds {min(ids)}: token ids start at 0")


def _require_support(who: str, token_ids: tuple[int, ...], support: tuple[tuple[int, ...], ...]) -> None:
    if len(support) != len(token_ids):
        raise ContractError(f"{who}: {len(support)} supports for {len(token_ids)} tokens: hand over the retained ids of every token")
    for position, (token, kept) in enumerate(zip(token_ids, support)):
        if not all(map(lt, kept, kept[1:])):
            raise ContractError(f"{who}: support at token {position} is not strictly ascending: sort the retained ids")
        if token not in kept:
            raise ContractError(
                f"{who}: token id {token} at token {position} is outside its own support: record ids where the token is drawn"
            )
