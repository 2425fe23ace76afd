"""The strict sampler on a card: one batched draw per step, and no wait of the host for the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray

from rlk.contract.numerics import Numerics
from rlk.contract.sampling import SamplingParams
from rlk.model.config import Qwen3Config
from rlk.rollout.sampling_device import DeviceSampler, SupportLog
from rlk.rollout.vllm.sampler import StrictSampler


class Batch(NamedTuple):
    """Requests of a step, in the order of its rows, and what does not change from token to token."""

    requests: list[str]
    states: list[Any]
    samples: tuple[int, ...]
    params: tuple[SamplingParams, ...]
    truncating: NDArray[np.bool_]


class DeviceStrictSampler(StrictSampler):
    """Draws all rows of a step, unfinished prefills too, whose token vLLM drops. Supports come to the host as bits, listed when asked for.

    max_rows: most requests of one step.
    """

    def __init__(self, runner: Any, config: Qwen3Config, numerics: Numerics, *, max_rows: int) -> None:
        super().__init__(runner)
        padded = config.padded_vocab(numerics)
        self._sampler = DeviceSampler(max_rows, config.vocab_size, padded, numerics, runner.device)
        self._log = SupportLog(config.vocab_size, padded, runner.device)
        self._batch: Batch | None = None
        self._keep = True

    def clear(self, keep: bool) -> None:
        self._log.clear()
        self._batch, self._keep = None, keep

    def check(self) -> None:
        self._sampler.check()

    def retained(self) -> list[list[Any]]:
        listed = cast(Mapping[tuple[int, int], list[int]], self._log.listed())
        counts: dict[int, int] = {}
        for sample, position in listed:
            counts[sample] = max(counts.get(sample, 0), position + 1)
        return [[sample, [listed[sample, at] for at in range(count)]] for sample, count in counts.items()]

    def draw(self, logits: torch.Tensor, unfinished: NDArray[np.bool_]) -> tuple[torch.Tensor, torch.Tensor]:
        requests = self.runner.input_batch.req_ids
        if not requests:  # vLLM warms its sampler up before there is any request
            params = (SamplingParams(temperature=0.5, top_p=0.9),) * len(logits)
            drawn = self._sampler.sample(logits, self._sampler.stage(params, [0] * len(logits)))
            return drawn.ids.to(torch.int32), drawn.logprobs
        batch = self._batch
        if batch is None or batch.requests != requests:
            batch = self._batch = self._look_at(requests)
        positions = [len(state.output_token_ids) for state in batch.states]
        drawn = self._sampler.sample(logits, self._sampler.stage(batch.params, positions))
        self.recorder.put_last_rows("logp", drawn.logprobs)
        if self._keep and drawn.support is not None:
            kept = batch.truncating & ~unfinished
            tags: list[tuple[int, int] | None] = list(zip(batch.samples, positions, strict=True))
            for row in np.flatnonzero(~kept).tolist():
                tags[row] = None
            self._log.put(drawn.support, tags)
        return drawn.ids.to(torch.int32), drawn.logprobs

    def _look_at(self, requests: Sequence[str]) -> Batch:
        extras = [self.extra(request) for request in requests]
        params = tuple(SamplingParams(**extra["sampling"]) for extra in extras)
        return Batch(
            requests=list(requests),
            states=[self.runner.requests[request] for request in requests],
            samples=tuple(int(extra["sample_id"]) for extra in extras),
            params=params,
            truncating=np.array([asked.truncates for asked in params]),
        )
