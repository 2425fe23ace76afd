"""The strict sampler on a card: one batched draw per step, and no wait of the host for the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rlk.contract.numerics import Numerics
from rlk.contract.sampling import SamplingParams
from rlk.model.config import Qwen3Config
from rlk.rollout.sampling_device import DeviceSampler, SupportLog
from rlk.rollout.vllm.sampler import StrictSampler


class DeviceStrictSampler(StrictSampler):
    """Draws all rows of a step, unfinished prefills too, whose token vLLM drops. Supports come to the host as bits, listed when asked for.

    max_rows: most requests of one step.
    """

    def __init__(self, runner: Any, config: Qwen3Config, numerics: Numerics, *, max_rows: int) -> None:
        super().__init__(runner)
        padded = config.padded_vocab(numerics)
        self._sampler = DeviceSampler(max_rows, config.vocab_size, padded, numerics, runner.device)
        self._log = SupportLog(config.vocab_size, padded, runner.device)
        self._known: dict[str, tuple[int, SamplingParams]] = {}
        self._drawn: dict[int, int] = {}

    def clear(self) -> None:
        self._log.clear()
        self._known, self._drawn = {}, {}

    def check(self) -> None:
        self._sampler.check()

    def retained(self) -> list[list[Any]]:
        return [[sample, [list(self._log.ids((sample, at))) for at in range(count)]] for sample, count in self._drawn.items()]

    def draw(self, logits: torch.Tensor, unfinished: NDArray[np.bool_]) -> tuple[torch.Tensor, torch.Tensor]:
        requests = self.runner.input_batch.req_ids
        if not requests:  # vLLM warms its sampler up before there is any request
            params, positions = [SamplingParams(temperature=0.5, top_p=0.9)] * len(logits), [0] * len(logits)
        else:
            known = [self._asked(request) for request in requests]
            params, positions = [asked for _, asked in known], self.positions(requests)
        drawn = self._sampler.sample(logits, self._sampler.stage(params, positions))
        if requests:
            self.recorder.put_last_rows("logp", drawn.logprobs)
            if drawn.support is not None:
                tags = [
                    (sample, at) if asked.truncates and not skip else None
                    for (sample, asked), at, skip in zip(known, positions, unfinished.tolist(), strict=True)
                ]
                self._log.put(drawn.support, tags)
                self._drawn.update({tag[0]: tag[1] + 1 for tag in tags if tag is not None})
        return drawn.ids.to(torch.int32), drawn.logprobs

    def _asked(self, request: str) -> tuple[int, SamplingParams]:
        if request not in self._known:
            extra = self.extra(request)
            self._known[request] = int(extra["sample_id"]), SamplingParams(**extra["sampling"])
        return self._known[request]
