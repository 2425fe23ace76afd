"""The strict sampler in vLLM's seat: draws by (seed, position), scores in contract order, remembers what it retained."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata

from rlk.contract.numerics import Numerics
from rlk.contract.sampling import SamplingParams
from rlk.model.config import Qwen3Config
from rlk.parallel.collectives import Group
from rlk.rollout.sampling import sample_rows
from rlk.rollout.vllm.settings import KEY, LOGPROBS_MODE, EngineRefusal
from rlk.rollout.vllm.tracing import StepRecorder


class StrictSampler(nn.Module):
    """Replaces the sampler of vLLM's model runner.

    Every request carries its sample id and sampling parameters in ``extra_args["rlk"]``; vLLM's own sampling fields are unused.
    supports: {sample id: {output position: retained ids}} of truncating requests since the last :meth:`clear`.
    partial_rows: rows of unfinished prefills that were scheduled so far, evidence that prompts were really chunked.
    """

    def __init__(self, runner: Any, config: Qwen3Config, numerics: Numerics, tp: Group) -> None:
        super().__init__()
        self.logprobs_mode = LOGPROBS_MODE
        self.recorder = StepRecorder(runner, lambda request: int(self._extra(request)["sample_id"]))
        self.supports: dict[int, dict[int, list[int]]] = {}
        self.partial_rows = 0
        self._runner, self._config, self._numerics, self._tp = runner, config, numerics, tp

    def clear(self) -> None:
        """Forget the supports of earlier requests."""
        self.supports = {}

    def forward(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """logits fp32 [S, this rank's columns], one row per scheduled request -> ids [S, 1] int32 and their logprobs [S, 1] fp32.

        Rows of unfinished prefills are not sampled; vLLM drops what stands there. Ranks are not computed and read 0.
        """
        _require_untouched(sampling_metadata)
        count = logits.shape[0]
        unfinished = self._runner.discard_request_mask.np[:count]
        rows = [row for row in range(count) if not unfinished[row]]
        self.partial_rows += count - len(rows)
        ids = torch.zeros(count, 1, dtype=torch.int32)
        logprobs = torch.zeros(count, 1, dtype=torch.float32)
        if rows:
            self._sample(logits, rows, ids, logprobs)
        return SamplerOutput(ids, LogprobsTensors(ids.clone(), logprobs, torch.zeros(count, dtype=torch.int64)))

    def _sample(self, logits: torch.Tensor, rows: list[int], ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        requests = [self._runner.input_batch.req_ids[row] for row in rows]
        extras = [self._extra(request) for request in requests]
        params = [SamplingParams(**extra["sampling"]) for extra in extras]
        positions = [len(self._runner.requests[request].output_token_ids) for request in requests]
        drawn = sample_rows(
            logits[rows],
            params,
            positions,
            vocab_size=self._config.vocab_size,
            padded_vocab=self._config.padded_vocab(self._numerics),
            numerics=self._numerics,
            tp=self._tp,
        )
        ids[rows, 0] = drawn.ids.to(torch.int32)
        logprobs[rows, 0] = drawn.logprobs
        self.recorder.put_last_rows("logp", drawn.logprobs, rows)
        for extra, position, kept in zip(extras, positions, drawn.supports):
            if kept is not None:
                self.supports.setdefault(int(extra["sample_id"]), {})[position] = list(kept)

    def _extra(self, request: str) -> dict[str, Any]:
        extra = self._runner.requests[request].sampling_params.extra_args or {}
        if KEY not in extra:
            raise EngineRefusal(f"request {request} carries no {KEY!r} sampling parameters: send requests through VllmEngine.generate")
        carried: dict[str, Any] = extra[KEY]
        return carried


def _require_untouched(metadata: SamplingMetadata) -> None:
    """Refuse what would change logits between the model and the draw, and logprobs beyond the selected token's."""
    refused = {
        "penalties": not metadata.no_penalties,
        "allowed token ids": metadata.allowed_token_ids_mask is not None,
        "bad words": bool(metadata.bad_words_token_ids),
        "logprobs of tokens that were not selected": bool(metadata.max_num_logprobs) or bool(metadata.logprob_token_ids),
    }
    for name, present in refused.items():
        if present:
            raise EngineRefusal(f"strict sampling does not support {name}: send requests through VllmEngine.generate")
