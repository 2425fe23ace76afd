"""The strict sampler in vLLM's seat: draws by (seed, position), scores in contract order, remembers what it retained."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
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
    partial_rows: rows of unfinished prefills that were scheduled so far, evidence that prompts were really chunked.
    """

    def __init__(self, runner: Any) -> None:
        super().__init__()
        self.logprobs_mode = LOGPROBS_MODE
        self.recorder = StepRecorder(runner, lambda request: int(self.extra(request)["sample_id"]))
        self.partial_rows = 0
        self.runner = runner
        self._ranks = torch.zeros(0, dtype=torch.int64)

    def clear(self, keep: bool) -> None:
        """Forget what earlier requests retained; keep: whether to remember what the next ones retain."""
        raise NotImplementedError

    def retained(self) -> list[list[Any]]:
        """[sample id, [retained ids of each output position]] of every truncating request since the last :meth:`clear`.

        A position beyond the response may follow: it was drawn before its request was known to have stopped.
        """
        raise NotImplementedError

    def check(self) -> None:
        """FloatingPointError if a row of logits was not finite, unless :meth:`draw` raised that."""

    def draw(self, logits: torch.Tensor, unfinished: NDArray[np.bool_]) -> tuple[torch.Tensor, torch.Tensor]:
        """ids [S] int32 and their logprobs [S] fp32; whatever stands in an unfinished row is dropped."""
        raise NotImplementedError

    def forward(self, logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> SamplerOutput:
        """logits fp32 [S, this rank's columns], one row per scheduled request -> ids [S, 1] int32 and their logprobs [S, 1] fp32.

        Rows of unfinished prefills are not sampled; vLLM drops what stands there. Ranks are not computed and read 0.
        """
        _require_untouched(sampling_metadata)
        unfinished = self.runner.discard_request_mask.np[: logits.shape[0]].astype(bool)
        self.partial_rows += int(unfinished.sum())
        ids, logprobs = self.draw(logits, unfinished)
        if self._ranks.shape[0] < len(ids) or self._ranks.device != ids.device:
            self._ranks = torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
        return SamplerOutput(ids[:, None], LogprobsTensors(ids[:, None], logprobs[:, None], self._ranks[: len(ids)]))

    def extra(self, request: str) -> dict[str, Any]:
        """Sample id and sampling parameters of a request. EngineRefusal without them."""
        extra = self.runner.requests[request].sampling_params.extra_args or {}
        if KEY not in extra:
            raise EngineRefusal(f"request {request} carries no {KEY!r} sampling parameters: send requests through VllmEngine.generate")
        carried: dict[str, Any] = extra[KEY]
        return carried


class HostSampler(StrictSampler):
    """Draws row by row on the CPU; ranks hold the columns of their vocabulary shards."""

    def __init__(self, runner: Any, config: Qwen3Config, numerics: Numerics, tp: Group) -> None:
        super().__init__(runner)
        self._supports: dict[int, dict[int, list[int]]] = {}
        self._keep = True
        self._config, self._numerics, self._tp = config, numerics, tp

    def clear(self, keep: bool) -> None:
        self._supports, self._keep = {}, keep

    def retained(self) -> list[list[Any]]:
        return [[sample, [kept[at] for at in sorted(kept)]] for sample, kept in self._supports.items()]

    def draw(self, logits: torch.Tensor, unfinished: NDArray[np.bool_]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(len(logits), dtype=torch.int32)
        logprobs = torch.zeros(len(logits), dtype=torch.float32)
        rows = np.flatnonzero(~unfinished).tolist()
        if rows:
            self._draw(logits, rows, ids, logprobs)
        return ids, logprobs

    def _draw(self, logits: torch.Tensor, rows: list[int], ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        requests = [self.runner.input_batch.req_ids[row] for row in rows]
        extras = [self.extra(request) for request in requests]
        positions = [len(self.runner.requests[request].output_token_ids) for request in requests]
        drawn = sample_rows(
            logits[rows],
            [SamplingParams(**extra["sampling"]) for extra in extras],
            positions,
            vocab_size=self._config.vocab_size,
            padded_vocab=self._config.padded_vocab(self._numerics),
            numerics=self._numerics,
            tp=self._tp,
        )
        ids[rows] = drawn.ids.to(torch.int32)
        logprobs[rows] = drawn.logprobs
        self.recorder.put_last_rows("logp", drawn.logprobs, rows)
        for extra, position, kept in zip(extras, positions, drawn.supports):
            if self._keep and kept is not None:
                self._supports.setdefault(int(extra["sample_id"]), {})[position] = list(kept)


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
