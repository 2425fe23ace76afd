"""Samples as the trainer sees them, and the packed micro-batches they are cut into."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from rlk.contract.numerics import ContractError, Numerics
from rlk.contract.records import Request, Response
from rlk.contract.topology import token_leaves


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
    """Samples packed one after another, in id order, as tensors.

    ids, positions: int64[T]; positions restart at every sample. cu_seqlens: int64[S+1]. leaf_index, leaf_offsets: token order of
    weight gradients. rows: int64[A], the rows whose logits predict a response token (samples, then tokens, ascending); targets:
    int64[A] those tokens; temperature: fp32[A]; supports: retained ids per target, None where every id is retained.
    """

    samples: tuple[Sample, ...]
    ids: torch.Tensor
    positions: torch.Tensor
    cu_seqlens: torch.Tensor
    leaf_index: torch.Tensor
    leaf_offsets: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    temperature: torch.Tensor
    supports: tuple[tuple[int, ...] | None, ...]

    @property
    def tokens(self) -> int:
        """Packed rows T."""
        return self.ids.numel()

    def per_sample(self, values: Sequence[float]) -> list[list[float]]:
        """Cut one value per target (A of them) into one list per sample."""
        result, at = [], 0
        for sample in self.samples:
            count = len(sample.response.token_ids)
            result.append(list(values[at : at + count]))
            at += count
        return result


def micro_batch(samples: Sequence[Sample], numerics: Numerics) -> MicroBatch:
    """Pack samples (at least one, ids ascending)."""
    ids: list[int] = []
    positions: list[int] = []
    starts = [0]
    rows: list[int] = []
    targets: list[int] = []
    temperature: list[float] = []
    supports: list[tuple[int, ...] | None] = []
    for sample in samples:
        start, prompt, answer = starts[-1], sample.response.prompt_ids, sample.response.token_ids
        ids += sample.ids
        positions += range(len(sample.ids))
        starts.append(len(ids))
        rows += range(start + len(prompt) - 1, start + len(prompt) - 1 + len(answer))
        targets += answer
        temperature += [sample.request.sampling.scoring_temperature] * len(answer)
        supports += sample.response.support or [None] * len(answer)
    leaves = token_leaves([b - a for a, b in pairwise(starts)], numerics.canonical_cp, numerics.mma_k)
    integers = lambda values: torch.tensor(values, dtype=torch.int64)
    return MicroBatch(
        tuple(samples), integers(ids), integers(positions), integers(starts), integers(leaves.index), integers(leaves.offsets),
        integers(rows), integers(targets), torch.tensor(temperature, dtype=torch.float32), tuple(supports),
    )  # fmt: skip


def micro_batches(samples: Sequence[Sample], size: int, numerics: Numerics) -> Iterator[MicroBatch]:
    """Micro-batches of ``size`` samples with contiguous ids, in order. Samples may come in any order; equal ids raise ContractError.

    A sample without response tokens counts towards ``size`` but is left out: its rows would carry no loss and add only +0.
    """
    if size < 1:
        raise ContractError(f"micro_batch_size={size} holds no sample: use 1 or more")
    ordered = sorted(samples, key=lambda sample: sample.sample_id)
    if any(a.sample_id == b.sample_id for a, b in pairwise(ordered)):
        raise ContractError("two samples share one id: number the samples of a batch uniquely")
    for first in range(0, len(ordered), size):
        held = [sample for sample in ordered[first : first + size] if sample.response.token_ids]
        if held:
            yield micro_batch(held, numerics)
