"""Requests into vLLM's parameters, vLLM's outputs into responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlk.contract.records import Request, Response
from rlk.rollout.vllm.settings import KEY, EngineRefusal

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams


def vllm_params(request: Request, stop_token_ids: Sequence[int], strict: bool) -> SamplingParams:
    """vLLM's parameters of one request; only the selected token's logprob is asked for.

    Strict: the contract's parameters travel in extra_args and vLLM's own stay at their defaults. Native: vLLM's own, without a seed, since
    a seeded request crashes vLLM's CPU runner when its prompt is chunked; draws then follow the engine's seed and the order of requests.
    """
    from vllm import SamplingParams

    sampling = request.sampling
    mine: dict[str, Any]
    if strict:
        mine = {"extra_args": {KEY: {"sample_id": request.sample_id, "sampling": asdict(sampling)}}}
    else:
        mine = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    return SamplingParams(
        max_tokens=sampling.max_tokens, logprobs=0, detokenize=False, ignore_eos=True, stop_token_ids=list(stop_token_ids), **mine
    )


def response(request: Request, output: RequestOutput, kept: Sequence[Sequence[int]] | None, version: int) -> Response:
    """One finished output. EngineRefusal if it answers another prompt, is unfinished or has no logprobs; the record checks alignment."""
    completion = output.outputs[0]
    if tuple(output.prompt_token_ids or ()) != request.prompt_ids:
        raise EngineRefusal(f"sample {request.sample_id}: vLLM answered another prompt: start another engine")
    ids = tuple(int(token) for token in completion.token_ids)
    if completion.finish_reason is None or completion.logprobs is None:
        raise EngineRefusal(f"sample {request.sample_id}: vLLM returned an unfinished output or no logprobs")
    logprobs = tuple(float(position[token].logprob) for position, token in zip(completion.logprobs, ids, strict=True))
    # A token that was drawn before vLLM knew that its request had stopped is no part of the response.
    support = tuple(tuple(token) for token in kept[: len(ids)]) if kept is not None else None
    cached = int(output.num_cached_tokens or 0)
    return Response(request.sample_id, request.prompt_ids, ids, logprobs, support, completion.finish_reason, cached, version)
