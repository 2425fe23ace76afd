"""The parts of the strict engine for a card that need no card: metadata at fixed addresses, replay counts, draws of a whole step."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionCGSupport

from rlk.contract.numerics import DEFAULT
from rlk.contract.sampling import SamplingParams
from rlk.model.config import Qwen3Config
from rlk.rollout.sampling import sample_rows
from rlk.rollout.vllm.attention_cuda import CudaAttentionBackend, CudaMetadataBuilder
from rlk.rollout.vllm.sampler_cuda import DeviceStrictSampler
from rlk.rollout.vllm.settings import KEY, EngineRefusal, additional_config
from rlk.rollout.vllm.worker_cuda import CountedGraph

CONFIG = Qwen3Config(
    vocab_size=260, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    head_dim=32, rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=512,
)  # fmt: skip
WIDTH = CONFIG.padded_vocab(DEFAULT)


def builder() -> CudaMetadataBuilder:
    config: Any = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8), additional_config=additional_config(DEFAULT))
    spec: Any = None
    return CudaMetadataBuilder(spec, [], config, torch.device("cpu"))


def step(rows: list[int], lengths: list[int], slots: list[int]) -> Any:
    """vLLM's metadata of one step: rows and lengths of each request, filled-up requests with none."""
    return SimpleNamespace(
        causal=True, num_reqs=len(rows), num_actual_tokens=len(slots),
        query_start_loc=torch.tensor([0, *np.cumsum(rows)], dtype=torch.int32), seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table_tensor=torch.zeros(len(rows), 4, dtype=torch.int32), slot_mapping=torch.tensor(slots),
    )  # fmt: skip


def test_every_step_of_a_size_has_the_addresses_of_its_capture() -> None:
    made = builder()
    captured = made.build(0, step([1, 1, 1, 1], [1, 1, 1, 1], [-1, -1, -1, -1]))
    replayed = made.build(0, step([1, 1, 1, 0], [9, 3, 7, 0], [5, 6, 7, -1]))
    for name in ("query_start_loc", "seq_lens"):
        before, after = getattr(captured, name), getattr(replayed, name)
        assert before.data_ptr() == after.data_ptr()
        assert before.tolist() == after.tolist()  # the capture's own tensors show the later step
        assert after.dtype == torch.int64
    assert captured.query_start_loc.tolist() == [0, 1, 2, 3, 3]
    assert captured.seq_lens.tolist() == [9, 3, 7, 0]
    assert replayed.slots.tolist() == [5, 6, 7, -1]
    with pytest.raises(EngineRefusal, match="causal"):
        made.build(0, SimpleNamespace(**{**vars(step([1], [1], [0])), "causal": False}))


def test_a_card_builds_graphs_of_single_token_steps_over_pages_of_keys_then_values() -> None:
    assert CudaMetadataBuilder._cudagraph_support is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    assert CudaAttentionBackend.get_builder_cls() is CudaMetadataBuilder
    assert CudaAttentionBackend.get_kv_cache_shape(100, 16, 8, 128) == (100, 8, 16, 256)


def test_replays_are_counted() -> None:
    calls: list[int] = []
    graph: Any = SimpleNamespace(replay=lambda: calls.append(1))
    counted = CountedGraph(graph)
    for _ in range(3):
        counted.replay()
    assert (counted.replays, len(calls)) == (3, 3)


class Runner:
    """What the sampler looks at in vLLM's model runner."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch: Any = SimpleNamespace(req_ids=[])
        self.discard_request_mask = SimpleNamespace(np=np.zeros(8, dtype=bool))

    def add(self, request: str, sample: int, drawn: int, **sampling: Any) -> SamplingParams:
        asked = SamplingParams(**sampling)
        extra = {KEY: {"sample_id": sample, "sampling": asdict(asked)}}
        self.requests[request] = SimpleNamespace(sampling_params=SimpleNamespace(extra_args=extra), output_token_ids=[0] * drawn)
        self.input_batch.req_ids.append(request)
        return asked


def untouched() -> Any:
    return SimpleNamespace(
        no_penalties=True, allowed_token_ids_mask=None, bad_words_token_ids={}, max_num_logprobs=0, logprob_token_ids=None
    )


def test_a_step_is_drawn_scored_and_remembered_as_row_by_row() -> None:
    runner = Runner()
    params = [
        runner.add("a", 7, 0, temperature=0.7, top_p=0.9, seed=3),
        runner.add("b", 8, 0, temperature=1.3, top_k=5, seed=4),
        runner.add("c", 9, 2, temperature=0.0),
        runner.add("d", 10, 1, seed=5),
    ]
    logits = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)) * 4
    sampler = DeviceStrictSampler(runner, CONFIG, DEFAULT, max_rows=8)
    found = sampler(logits, untouched())
    expected = sample_rows(logits, params, [0, 0, 2, 1], vocab_size=260, padded_vocab=WIDTH, numerics=DEFAULT)
    assert found.sampled_token_ids[:, 0].tolist() == expected.ids.tolist()
    assert found.sampled_token_ids.dtype == torch.int32
    assert found.logprobs_tensors is not None
    assert torch.equal(found.logprobs_tensors.logprobs[:, 0], expected.logprobs)
    runner.requests["b"].output_token_ids.append(0)
    again = sample_rows(logits, params, [0, 1, 2, 1], vocab_size=260, padded_vocab=WIDTH, numerics=DEFAULT)
    assert sampler(logits, untouched()).sampled_token_ids[:, 0].tolist() == again.ids.tolist()
    kept = dict(sampler.retained())
    assert set(kept) == {7, 8}  # only these truncate
    assert [tuple(ids) for ids in kept[7]] == [expected.supports[0]]
    assert [tuple(ids) for ids in kept[8]] == [expected.supports[1], again.supports[1]]
    sampler.clear(keep=True)
    assert sampler.retained() == []
    sampler.clear(keep=False)
    sampler(logits, untouched())
    assert sampler.retained() == []


def test_rows_of_unfinished_prompts_leave_no_support() -> None:
    runner = Runner()
    runner.add("a", 7, 0, top_p=0.9)
    runner.discard_request_mask.np[0] = True
    sampler = DeviceStrictSampler(runner, CONFIG, DEFAULT, max_rows=8)
    sampler(torch.randn(1, WIDTH), untouched())
    assert (sampler.partial_rows, sampler.retained()) == (1, [])


def test_a_row_that_is_not_finite_is_raised_when_the_generation_is_checked() -> None:
    runner = Runner()
    runner.add("a", 7, 3, seed=11)
    sampler = DeviceStrictSampler(runner, CONFIG, DEFAULT, max_rows=8)
    logits = torch.randn(1, WIDTH)
    logits[0, 5] = float("nan")
    sampler(logits, untouched())
    with pytest.raises(FloatingPointError, match="seed 11 at position 3"):
        sampler.check()
    sampler.check()


def test_a_warm_up_without_requests_draws_and_remembers_nothing() -> None:
    sampler = DeviceStrictSampler(Runner(), CONFIG, DEFAULT, max_rows=8)
    assert sampler(torch.randn(3, WIDTH), untouched()).sampled_token_ids.shape == (3, 1)
    assert sampler.retained() == []
