"""Samples as the trainer sees them, and the packed micro-batches they are cut into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np
import torch

from rlk.contract.numerics import ContractError, Numerics
from rlk.contract.records import Request, Response
from rlk.contract.topology import local_token_leaves, token_leaves, zigzag_positions
from rlk.train.context import Context, Integers, context_of


@dataclass(frozen=True)
class Sample:
    """A request and its response; raises ContractError where they do not belong together.

    The rollout's logprobs travel inside the response for comparison only: no score and no loss reads them.
    """

    request: Request
    response: Response

    def __post_init__(self) -> None:
        request, response = self.request, self.response
        if request.sample_id != response.sample_id or request.prompt_ids != response.prompt_ids:
            raise ContractError(
                f"request {request.sample_id} and response {response.sample_id} have different ids or prompts: pair them by id"
            )
        if request.sampling.truncates and response.support is None:
            raise ContractError(
                f"response {response.sample_id} was truncated by top-p or top-k but carries no retained ids: hand them over"
            )
        if not request.sampling.truncates and response.support is not None:
            raise ContractError(f"response {response.sample_id} carries retained ids although its request does not truncate: drop them")

    @property
    def sample_id(self) -> int:
        return self.response.sample_id

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and response tokens."""
        return self.response.prompt_ids + self.response.token_ids


def pair(requests: Sequence[Request], responses: Sequence[Response]) -> list[Sample]:
    """Samples in id order. Raises ContractError on a duplicate, missing or surplus id."""
    by_id = {request.sample_id: request for request in requests}
    answered = {response.sample_id: response for response in responses}
    if len(by_id) != len(requests) or len(answered) != len(responses):
        raise ContractError("two samples share one id: number the requests of a batch uniquely")
    if by_id.keys() != answered.keys():
        odd = sorted(by_id.keys() ^ answered.keys())[:5]
        raise ContractError(f"sample ids {odd} have no request or no response: pass the requests that were answered")
    return [Sample(by_id[i], answered[i]) for i in sorted(by_id)]


@dataclass(frozen=True)
class MicroBatch:
    """Samples packed one after another, in id order, as the tensors of one CP rank.

    A rank of CP > 1 holds, per sample, its two zigzag chunks of the padded sequence (``rlk.contract.topology.zigzag_positions``); padding
    rows have id and position 0 and carry neither loss nor gradient. CP = 1 holds every token and no padding.

    samples: all of them, on every rank. ids, positions: int64[T]; positions restart at every sample. cu_seqlens: int64[S+1], the rank's
    own rows. leaf_index, leaf_offsets: token order of weight gradients, the rank's leaves. context: how the rows stand in whole
    sequences, None for CP = 1.
    Of the A response tokens of all samples (samples, then tokens, ascending) the rank scores some: own: int64, which; rows: int64, the
    rows whose logits predict them; targets: int64, those tokens; temperature: fp32; supports: their retained ids, None where every id is
    retained. joined: int64[A], the row of every response token when the ranks' rows are joined in rank order.
    scored: int64, the rows that need logits: ``rows``, or one row if the rank scores none. scored_index, scored_offsets: token order of a
    weight gradient over them alone. Groups without such a row are left out, which changes no byte: they would add +0 (contract, 2).
    """

    samples: tuple[Sample, ...]
    ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    leaf_index: torch.Tensor
    leaf_offsets: torch.Tensor
    context: Context | None
    own: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    temperature: torch.Tensor
    supports: tuple[tuple[int, ...] | None, ...]
    joined: torch.Tensor
    scored: torch.Tensor
    scored_index: torch.Tensor
    scored_offsets: torch.Tensor

    @property
    def tokens(self) -> int:
        """Rows T of this rank, padding included."""
        return self.ids.numel()

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return max(len(sample.ids) for sample in self.samples)

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with its tensors on ``device``."""
        if device == self.ids.device:
            return self
        moved = replace(self, **_moved(self, device))
        return moved if self.context is None else replace(moved, context=replace(self.context, **_moved(self.context, device)))

    def per_sample(self, values: Sequence[float]) -> list[list[float]]:
        """Cut one value per response token (A of them) into one list per sample."""
        result, at = [], 0
        for sample in self.samples:
            count = len(sample.response.token_ids)
            result.append(list(values[at : at + count]))
            at += count
        return result


def _moved(held: MicroBatch | Context, device: torch.device) -> dict[str, Any]:
    return {f.name: on_device(value, device) for f in fields(held) if isinstance(value := getattr(held, f.name), torch.Tensor)}


def on_device(held: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on ``device``; to a card from pinned memory, so that the host does not wait until it has done what it was
    told before."""
    return held.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else held


def micro_batch(samples: Sequence[Sample], numerics: Numerics, cp: int = 1, rank: int = 0) -> MicroBatch:
    """Pack samples (at least one, ids ascending) for CP rank ``rank`` of ``cp``."""
    lengths = [len(sample.ids) for sample in samples]
    held = [held_positions(length, cp, numerics) for length in lengths]
    mine = [positions[rank] for positions in held]
    starts = [0, *accumulate(len(positions) for positions in mine)]
    place = _places(held)
    ids: list[Integers] = []
    positions: list[Integers] = []
    for sample, rows in zip(samples, mine):
        tokens, at = np.array(sample.ids, dtype=np.int64), np.array(rows, dtype=np.int64)
        real = at < len(tokens)
        positions.append(np.where(real, at, 0))
        ids.append(np.where(real, tokens[positions[-1]], 0))
    answers = [sample.response.token_ids for sample in samples]
    joined = np.concatenate([rows[n - len(answer) - 1 : n - 1] for rows, n, answer in zip(place, lengths, answers)])
    which = np.flatnonzero(joined // starts[-1] == rank)
    temperatures = [np.full(len(answer), s.request.sampling.scoring_temperature, np.float32) for s, answer in zip(samples, answers)]
    supports = [kept for s, answer in zip(samples, answers) for kept in s.response.support or (None,) * len(answer)]
    # CP = 1 holds no padding, and leaves that index its rows are those of the whole batch.
    leaves = (
        token_leaves(lengths, numerics.canonical_cp, numerics.mma_k)
        if cp == 1
        else local_token_leaves(lengths, cp, rank, numerics.canonical_cp, numerics.mma_k)
    )
    index, offsets = _integers(leaves.index), _integers(leaves.offsets)
    own = joined[which] % starts[-1]
    scored = _integers(own if len(own) else (0,))
    return MicroBatch(
        tuple(samples), _integers(np.concatenate(ids)), _integers(np.concatenate(positions)), _integers(starts), index, offsets,
        None if cp == 1 else context_of(lengths, mine, place, starts), _integers(which), _integers(own),
        _integers(np.array(list(chain(*answers)))[which]), torch.from_numpy(np.concatenate(temperatures)[which]),
        tuple(supports[at] for at in which), _integers(joined), scored, *_leaves_of(scored, index, offsets, starts[-1], numerics.mma_k),
    )  # fmt: skip


def _integers(values: Sequence[int] | Integers) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))  # several times as fast as torch.tensor


def _leaves_of(
    rows: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, tokens: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index and offsets of the same leaves where only ``rows`` of the ``tokens`` are there, without groups that hold none of them."""
    place = torch.full((tokens + 1,), -1)
    place[rows] = torch.arange(len(rows))
    groups = place[index].view(-1, group)  # −1 finds the last place, which is −1
    held = (groups >= 0).any(dim=1)
    before = torch.cat([torch.zeros(1, dtype=torch.int64), held.cumsum(0)])
    return groups[held].flatten(), before[offsets // group] * group


def held_positions(length: int, cp: int, numerics: Numerics) -> list[tuple[int, ...]]:
    """Positions of one sequence that each CP rank holds, in its local order."""
    if cp == 1:
        return [tuple(range(length))]
    return [zigzag_positions(length, cp, rank, numerics.canonical_cp) for rank in range(cp)]


def _places(held: Sequence[Sequence[Sequence[int]]]) -> list[Integers]:
    """Of each sample, by position, the row when the rows of all ranks are joined in rank order; held[sample][rank] lists positions."""
    result = [np.empty(sum(map(len, ranks)), dtype=np.int64) for ranks in held]
    row = 0
    for rank in range(len(held[0])):
        for rows, positions in zip(result, held):
            rows[list(positions[rank])] = np.arange(row, row + len(positions[rank]))
            row += len(positions[rank])
    return result


def micro_batches(samples: Sequence[Sample], size: int, numerics: Numerics, cp: int = 1, rank: int = 0) -> Iterator[MicroBatch]:
    """CP rank ``rank``'s part of micro-batches of ``size`` samples with contiguous ids, in order.

    Samples may come in any order; equal ids raise ContractError. A sample without response tokens counts towards ``size`` but is left
    out: its rows would carry no loss and add only +0.
    """
    if size < 1:
        raise ContractError(f"micro_batch_size={size} holds no sample: use 1 or more")
    ordered = sorted(samples, key=lambda sample: sample.sample_id)
    if any(a.sample_id == b.sample_id for a, b in pairwise(ordered)):
        raise ContractError("two samples share one id: number the samples of a batch uniquely")
    for first in range(0, len(ordered), size):
        held = [sample for sample in ordered[first : first + size] if sample.response.token_ids]
        if held:
            yield micro_batch(held, numerics, cp, rank)
