"""Real vLLM on the CPU, strict and native. Each engine runs in a subprocess of its own: this file run as a script is the far end."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlk.contract.numerics import DEFAULT
from rlk.contract.records import Request, Response
from rlk.contract.sampling import SamplingParams
from rlk.kernels.attention import attention
from rlk.kernels.logp import logp, support_mask
from rlk.model.config import Qwen3Config
from rlk.model.layout import hf_shapes
from rlk.model.qwen3 import Qwen3Dense
from rlk.model.trace import Trace
from rlk.model.weights import load_checkpoint, save_checkpoint
from rlk.rollout.sampling import retained_ids

pytestmark = pytest.mark.slow

CONFIG = Qwen3Config(
    vocab_size=260, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    head_dim=32, rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=512,
)  # fmt: skip
FEW_PAGES = 40 * 16 * CONFIG.num_hidden_layers * CONFIG.num_key_value_heads * 2 * CONFIG.head_dim * 2
NUCLEUS = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}


class Remote:
    """A VllmEngine in another process: ``remote("generate", requests)``. Errors come back as RuntimeError("Type: message")."""

    def __init__(self, **arguments: Any) -> None:
        self._connection, far = Pipe()
        command = [sys.executable, __file__, str(far.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[far.fileno()], env={**os.environ, "OMP_NUM_THREADS": "1"})
        far.close()
        self._connection.send(("start", (), arguments))
        self._answers = 1

    def __call__(self, method: str, *arguments: Any, **named: Any) -> Any:
        self._connection.send((method, arguments, named))
        self._answers += 1
        while self._answers:  # also takes the answer to the start, so that engines start side by side
            assert self._connection.poll(300), f"no answer to {method}"
            self._answers -= 1
            error, value = self._connection.recv()
            if error:
                raise RuntimeError(error)
        return value

    def hang_up(self) -> None:
        self._connection.close()


def serve(connection: Connection) -> None:
    """The far end: calls methods of one engine until the connection closes."""
    from rlk.rollout.vllm.engine import VllmEngine

    engine: VllmEngine | None = None
    while True:
        try:
            method, arguments, named = connection.recv()
        except EOFError:
            break
        try:
            if method == "start":
                if engine:
                    engine.close()
                engine, value = None, None
                engine = VllmEngine(**named)
            else:
                value = getattr(engine, method)(*arguments, **named)
            connection.send((None, value))
        except Exception as error:
            connection.send((f"{type(error).__name__}: {error}", None))
    if engine:
        engine.close()


@dataclass
class Setup:
    """strict steps through 64 tokens; whole takes any prompt at once, has few pages and lives in vLLM's own separate process.

    spare serves what its user starts in it.
    """

    strict: Remote
    whole: Remote
    spare: Remote
    first: Path
    second: Path
    hashes: tuple[str, str]


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    root = tmp_path_factory.mktemp("checkpoints")
    hashes = tuple(save_checkpoint(root / name, CONFIG, random_weights(seed)) for seed, name in enumerate(("first", "second")))
    first = root / "first"
    engines = (
        Remote(checkpoint=first, mode="strict"),
        Remote(checkpoint=first, mode="strict", max_num_batched_tokens=512, kv_cache_bytes=FEW_PAGES, separate_process=True),
        Remote(checkpoint=first, mode="native"),
    )
    yield Setup(*engines, first, root / "second", hashes)
    for engine in engines:
        engine.hang_up()
    for engine in engines:
        engine.process.wait(60)


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    make = lambda shape: torch.randn(*shape, generator=generator) * 0.1 + (1.0 if len(shape) == 1 else 0.0)
    return {name: make(shape).bfloat16() for name, shape in hf_shapes(CONFIG).items()}


def request(sample_id: int, length: int, *, start: int = 0, **sampling: Any) -> Request:
    prompt = tuple((7 * i + 3 * start + i * i) % CONFIG.vocab_size for i in range(length))
    return Request(sample_id, prompt, SamplingParams(**{"max_tokens": 12, **sampling}))


def mixed_requests() -> list[Request]:
    return [
        request(0, 100, temperature=0.0),
        request(1, 33, start=1, seed=5),
        request(2, 5, start=2, seed=6, **NUCLEUS),
        request(3, 150, start=3, seed=7, **NUCLEUS),
        request(4, 1, start=4, seed=8, max_tokens=40),
    ]


def tokens_and_bytes(response: Response) -> tuple[tuple[int, ...], bytes, tuple[tuple[int, ...], ...] | None]:
    return response.token_ids, struct.pack(f"{len(response.logprobs)}f", *response.logprobs), response.support


def offline(checkpoint: Path, responses: Sequence[Response], trace: Trace | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """All sequences packed as a trainer packs them, one pass: logits of every row, and cu_seqlens."""
    model = Qwen3Dense(CONFIG, DEFAULT)
    model.load_hf(load_checkpoint(checkpoint).tensors)
    sequences = [response.prompt_ids + response.token_ids for response in responses]
    lengths = torch.tensor([0] + [len(s) for s in sequences])
    cu_seqlens = lengths.cumsum(0)
    positions = torch.cat([torch.arange(len(s)) for s in sequences])

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        tile = {"kv_tile": DEFAULT.kv_tile, "kv_split": DEFAULT.kv_split}
        return attention(q, k, v, cu_seqlens, scale=CONFIG.attention_scale, **tile).flatten(1)

    hidden = model(torch.tensor(sum(sequences, ())), positions, attend, trace)
    return model.logits(hidden, trace), cu_seqlens


def rescored(checkpoint: Path, requests: Sequence[Request], responses: Sequence[Response]) -> list[bytes]:
    """The selected logprobs of each response from one packed offline pass."""
    logits, cu_seqlens = offline(checkpoint, responses)
    result = []
    for asked, response, start in zip(requests, responses, cu_seqlens.tolist()):
        first = start + len(response.prompt_ids) - 1
        rows = logits[first : first + len(response.token_ids)]
        temperature = torch.full((len(rows),), asked.sampling.scoring_temperature)
        mask = support_mask(response.support, CONFIG.vocab_size) if response.support else None
        values = logp(
            rows, torch.tensor(response.token_ids), temperature,
            vocab_size=CONFIG.vocab_size, padded_vocab=CONFIG.padded_vocab(DEFAULT), support=mask,
        )  # fmt: skip
        result.append(values.numpy().tobytes())
    return result


def mismatches(left: Sequence[bytes], right: Sequence[bytes]) -> int:
    return sum(a != b for x, y in zip(left, right, strict=True) for a, b in zip(x, y, strict=True))


def test_strict_engine_is_what_was_asked_for(setup: Setup) -> None:
    found = setup.strict("readback")
    assert found["model"] == "rlk.rollout.vllm.model.RlkQwen3ForCausalLM"
    assert found["attention"] == ["rlk.rollout.vllm.attention.RlkAttentionImpl"]
    assert found["kv_cache"]["shape"][1:] == [8, 16, 64]
    assert (found["model_hash"], found["model_hash_of"], found["weight_version"]) == (setup.hashes[0], "live parameters", 0)
    assert found["pid"] != setup.whole("readback")["pid"]


def test_logprobs_equal_a_packed_offline_pass_to_the_byte(setup: Setup) -> None:
    requests = mixed_requests()
    responses = setup.strict("generate", requests)
    returned = [tokens_and_bytes(response)[1] for response in responses]
    assert [len(response.token_ids) for response in responses] == [12, 12, 12, 12, 40]
    assert mismatches(returned, rescored(setup.first, requests, responses)) == 0
    assert mismatches(returned, rescored(setup.second, requests, responses)) > 0  # other weights must be seen
    ran = {entry["op"]: entry for entry in setup.strict("readback")["kernels"]}
    assert {"attention.paged", "det_gemm", "embedding", "lm_head", "logp", "qk_norm", "rms_norm", "rope", "swiglu"} <= set(ran)
    assert all(entry["backend"] == "cpu" and entry["calls"] > 0 for entry in ran.values())


def test_greedy_repeats_and_seeds_decide(setup: Setup) -> None:
    group = [request(i, 9, seed=i) for i in range(8)]
    once, again = (setup.strict("generate", group) for _ in range(2))
    assert [r.token_ids for r in once] == [r.token_ids for r in again]
    assert len({r.token_ids for r in once}) > 1
    greedy = setup.strict("generate", [request(i, 9, temperature=0.0, seed=i) for i in range(2)])
    assert greedy[0].token_ids == greedy[1].token_ids


def test_warm_prefix_equals_cold(setup: Setup) -> None:
    asked = [request(0, 33, start=9, seed=1, **NUCLEUS)]
    setup.strict("reset_prefix_cache")
    cold, warm = (setup.strict("generate", asked)[0] for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, 32)
    assert tokens_and_bytes(cold) == tokens_and_bytes(warm)


def test_chunked_prefill_equals_whole_prefill(setup: Setup) -> None:
    asked = [request(0, 100, start=11, seed=2, **NUCLEUS), request(1, 70, start=12, seed=3)]
    setup.strict("reset_prefix_cache")
    before = setup.strict("readback")["partial_prefill_rows"]
    chunked, whole = setup.strict("generate", asked), setup.whole("generate", asked)
    assert setup.strict("readback")["partial_prefill_rows"] >= before + 2
    assert setup.whole("readback")["partial_prefill_rows"] == 0
    assert [tokens_and_bytes(r) for r in chunked] == [tokens_and_bytes(r) for r in whole]


def test_neighbours_in_the_batch_change_nothing(setup: Setup) -> None:
    requests = mixed_requests()
    together = {r.sample_id: tokens_and_bytes(r) for r in setup.strict("generate", requests)}
    reversed_order = {r.sample_id: tokens_and_bytes(r) for r in setup.strict("generate", requests[::-1])}
    setup.strict("reset_prefix_cache")
    alone = {r.sample_id: tokens_and_bytes(r) for one in requests for r in setup.strict("generate", [one])}
    assert together == reversed_order == alone


def test_preempted_requests_continue_with_the_same_bytes(setup: Setup) -> None:
    requests = [request(i, 20, start=i, seed=i, max_tokens=60, **NUCLEUS) for i in range(12)]
    before = setup.whole("readback")["counters"]["num_preemptions"]
    squeezed = setup.whole("generate", requests)
    assert setup.whole("readback")["counters"]["num_preemptions"] > before
    roomy = setup.strict("generate", requests)
    assert setup.strict("readback")["counters"]["num_preemptions"] == 0
    assert [tokens_and_bytes(r) for r in squeezed] == [tokens_and_bytes(r) for r in roomy]


def test_supports_are_complete(setup: Setup) -> None:
    requests = mixed_requests()
    responses = setup.strict("generate", requests)
    logits, cu_seqlens = offline(setup.first, responses)
    for asked, response, start in zip(requests, responses, cu_seqlens.tolist()):
        if not asked.sampling.truncates:
            assert response.support is None
            continue
        first = start + len(response.prompt_ids) - 1
        expected = [tuple(retained_ids(logits[first + i], asked.sampling) or ()) for i in range(len(response.token_ids))]
        assert list(response.support) == expected
        assert 1 < len(expected[0]) <= 50
    without = setup.strict("generate", requests, supports=False)
    assert [r.support for r in without] == [None] * len(without)
    assert [tokens_and_bytes(r)[:2] for r in without] == [tokens_and_bytes(r)[:2] for r in responses]


def test_trace_equals_the_offline_pass(setup: Setup, tmp_path: Path) -> None:
    requests = mixed_requests()
    responses = setup.strict("trace", requests, tmp_path / "trace.safetensors")
    found = load_file(tmp_path / "trace.safetensors")
    trace = Trace()
    _, cu_seqlens = offline(setup.first, responses, trace)
    expected = trace.tensors()
    for response, start in zip(responses, cu_seqlens.tolist()):
        for name, whole in expected.items():
            key = f"{response.sample_id}/{name}"
            positions = found[f"{key}.positions"]
            # The last token is drawn and never fed back; logits exist where a chunk of the prompt or a step ended.
            assert positions.max() == response.length - 2
            if name != "logits":
                assert positions.tolist() == list(range(response.length - 1))
            assert torch.equal(found[key].contiguous().view(torch.uint8), whole[start + positions].contiguous().view(torch.uint8)), key
        drawn = found[f"{response.sample_id}/logp"]
        assert drawn.numpy().tobytes() == tokens_and_bytes(response)[1]


def test_single_samples_are_refused_and_the_rest_is_served(setup: Setup) -> None:
    requests = [request(0, 512), request(1, 8), Request(2, (CONFIG.vocab_size,), SamplingParams()), request(3, 508, seed=4)]
    long, fine, foreign, last = setup.strict("generate", requests)
    assert long.finish_reason == "refused: a prompt of 512 tokens leaves no room in a context of 512"
    assert foreign.finish_reason == "refused: prompt id 260 is outside the vocabulary of 260"
    assert long.token_ids == foreign.token_ids == ()
    assert len(fine.token_ids) == 12
    assert (len(last.token_ids), last.finish_reason) == (4, "length")
    with pytest.raises(RuntimeError, match="sample id 1 is given twice"):
        setup.strict("generate", [request(1, 3), request(1, 4)])


def test_weight_update(setup: Setup, tmp_path: Path) -> None:
    asked = [request(0, 33, start=20, temperature=0.0)]
    before = setup.strict("generate", asked)[0]
    assert setup.strict("generate", asked)[0].cached_tokens == 32
    with pytest.raises(RuntimeError, match=r"EngineRefusal: .* hash to .*, announced was " + setup.hashes[0]):
        setup.strict("load_weights", setup.second, 1, announced=setup.hashes[0])
    with pytest.raises(RuntimeError, match=r"EngineRefusal: .* announced was " + setup.hashes[0]):
        setup.whole("load_weights", setup.second, 1, announced=setup.hashes[0])
    torn = tmp_path / "torn"
    save_checkpoint(torn, CONFIG, random_weights(1))
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-64])
    with pytest.raises(RuntimeError, match=r"CheckpointError: .*truncated"):
        setup.strict("load_weights", torn, 1)
    still = setup.strict("generate", asked)[0]
    assert (tokens_and_bytes(still), still.weight_version) == (tokens_and_bytes(before), 0)

    assert setup.strict("load_weights", setup.second, 1, announced=setup.hashes[1]) == setup.hashes[1]
    found = setup.strict("readback")
    assert (found["model_hash"], found["weight_version"]) == (setup.hashes[1], 1)
    after = setup.strict("generate", asked)[0]
    assert (after.cached_tokens, after.weight_version) == (0, 1)
    assert rescored(setup.second, asked, [after]) == [tokens_and_bytes(after)[1]]
    assert tokens_and_bytes(after)[1] != tokens_and_bytes(before)[1]
    with pytest.raises(RuntimeError, match="weight version 1 is not newer than 1"):
        setup.strict("load_weights", setup.first, 1)
    setup.strict("_rpc", "rlk_load_weights", str(setup.first), None)  # an update that stopped half-way
    with pytest.raises(RuntimeError, match="EngineRefusal: the weight version is unknown"):
        setup.strict("generate", asked)
    setup.strict("load_weights", setup.first, 2)
    assert tokens_and_bytes(setup.strict("generate", asked)[0]) == tokens_and_bytes(before)


def test_native_engine_is_untouched_and_differs(setup: Setup) -> None:
    setup.spare("start", checkpoint=setup.first, mode="native")
    requests = [request(0, 100, temperature=0.0, max_tokens=64), request(1, 33, seed=5, **NUCLEUS)]
    responses = setup.spare("generate", requests)
    found = setup.spare("readback")
    assert (found["kernels"], found["numerics"]) == ([], None)
    assert all(module.startswith(("vllm.", "torch.")) for module in found["modules"])
    assert found["sampler"] == "vllm.v1.sample.sampler.Sampler"
    assert responses[1].support is None
    greedy = responses[:1]
    assert mismatches([tokens_and_bytes(greedy[0])[1]], rescored(setup.first, requests[:1], greedy)) > 0
    assert setup.spare("load_weights", setup.second, 1) == setup.hashes[1]
    updated = setup.spare("generate", requests[:1])[0]
    assert updated.weight_version == 1
    assert updated.logprobs[0] != responses[0].logprobs[0]
    torch.testing.assert_close(torch.tensor(updated.logprobs[0]), torch.tensor(first_logprob(setup.second, updated)), atol=6e-2, rtol=0)


def test_two_ranks_answer_as_one(setup: Setup) -> None:
    setup.spare("start", checkpoint=setup.first, mode="strict", tensor_parallel_size=2)
    requests = mixed_requests()
    expected = [tokens_and_bytes(response) for response in setup.strict("generate", requests)]
    assert [tokens_and_bytes(response) for response in setup.spare("generate", requests)] == expected
    found = setup.spare("readback")
    ranks = found["ranks"]
    assert [rank["shards"] for rank in ranks] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [rank["model_hash"] for rank in ranks] == [setup.hashes[0]] * 2
    assert len({rank["shard_hash"] for rank in ranks}) == len({rank["pid"] for rank in ranks}) == 2
    assert [rank["kv_cache"]["shape"][1:] for rank in ranks] == [[4, 16, 64]] * 2
    assert [(rank["device"], rank["transport"]) for rank in ranks] == [("cpu", "gloo")] * 2
    assert {row["op"] for rank in ranks for row in rank["traffic"]} == {"check", "all_gather", "all_to_all"}
    with pytest.raises(RuntimeError, match="EngineRefusal: intermediates are whole on one rank only"):
        setup.spare("trace", requests, Path("trace.safetensors"))
    with pytest.raises(RuntimeError, match="announced was 00"):
        setup.spare("load_weights", setup.second, 1, announced="00")
    assert setup.spare("load_weights", setup.second, 1) == setup.hashes[1]
    updated = setup.spare("generate", requests)
    assert [tokens_and_bytes(response)[1] for response in updated] == rescored(setup.second, requests, updated)
    os.kill(ranks[1]["pid"], signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"EngineRefusal: .*rollout rank 1 \(process \d+\) ended"):
        setup.spare("generate", requests)


def test_two_native_ranks_serve_new_weights(setup: Setup) -> None:
    setup.spare("start", checkpoint=setup.first, mode="native", tensor_parallel_size=2)
    asked = [request(0, 33, temperature=0.0, max_tokens=8)]
    (before,) = setup.spare("generate", asked)
    assert setup.spare("load_weights", setup.second, 1) == setup.hashes[1]
    (after,) = setup.spare("generate", asked)
    ranks = setup.spare("readback")["ranks"]
    assert [(rank["model_hash"], rank["kernels"]) for rank in ranks] == [(setup.hashes[1], [])] * 2
    assert (after.weight_version, after.support) == (1, None)
    torch.testing.assert_close(torch.tensor(after.logprobs[0]), torch.tensor(first_logprob(setup.second, after)), atol=6e-2, rtol=0)
    assert after.logprobs[0] != before.logprobs[0]


def test_unsupported_features_stop_a_strict_start(setup: Setup) -> None:
    refused = {
        "speculative decoding": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "LoRA": {"enable_lora": True},
        "KV cache dtype fp8": {"kv_cache_dtype": "fp8"},
        "engine_options may not set block_size": {"block_size": 32},
    }
    for named, options in refused.items():
        with pytest.raises(RuntimeError, match=f"EngineRefusal: .*{named}"):
            setup.spare("start", checkpoint=setup.first, mode="strict", engine_options=options)


def test_a_stop_id_ends_a_response_and_belongs_to_it(setup: Setup) -> None:
    asked = [request(0, 9, temperature=0.0)]
    whole = setup.strict("generate", asked)[0]
    stop = whole.token_ids[5]
    setup.spare("start", checkpoint=setup.first, mode="strict", stop_token_ids=[stop])
    stopped = setup.spare("generate", asked)[0]
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert stopped.finish_reason == "stop"


def test_an_engine_that_failed_underway_serves_nothing_more(setup: Setup, tmp_path: Path) -> None:
    weights = random_weights(0)
    weights["model.norm.weight"][3] = float("nan")
    save_checkpoint(tmp_path / "nan", CONFIG, weights)
    setup.spare("start", checkpoint=tmp_path / "nan", mode="strict")
    with pytest.raises(RuntimeError, match="FloatingPointError"):
        setup.spare("generate", [request(0, 5)])
    with pytest.raises(RuntimeError, match="EngineRefusal: an earlier call left requests inside vLLM"):
        setup.spare("generate", [request(1, 5)])


def first_logprob(checkpoint: Path, response: Response) -> float:
    logits, _ = offline(checkpoint, [response])
    row = logits[len(response.prompt_ids) - 1].double()
    return float(row.log_softmax(0)[response.token_ids[0]])


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
