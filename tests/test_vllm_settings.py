"""What strict mode refuses by name, and that installing rlk leaves vLLM as it was."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlk.contract.numerics import DEFAULT, HOPPER, Numerics
from rlk.contract.records import Request
from rlk.contract.sampling import SamplingParams
from rlk.model.config import CheckpointError, Qwen3Config
from rlk.rollout.requests import eos_token_ids, refusal
from rlk.rollout.vllm.plugin import ARCHITECTURE, MIXED_ARCHITECTURE
from rlk.rollout.vllm.settings import (
    LOGPROBS_MODE,
    WORKERS,
    EngineRefusal,
    additional_config,
    numerics_of,
    require_supported,
    transport_of,
)
from rlk.rollout.vllm.wanted import LARGEST_GRAPH, Wanted, default_cudagraph_sizes

CONFIG = Qwen3Config(
    vocab_size=260, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    head_dim=32, rms_norm_eps=1e-6, rope_theta=10000.0, max_position_embeddings=512,
)  # fmt: skip


def supported(directory: Path, **config: Any) -> Any:
    """The fields of vLLM's configuration that strict mode looks at, as a strict engine sets them."""
    (directory / "config.json").write_text(json.dumps({**CONFIG.to_dict(), **config}))
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(directory), quantization=None, dtype="torch.bfloat16", logits_processors=None, logprobs_mode=LOGPROBS_MODE,
            architectures=[ARCHITECTURE], max_model_len=512,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, world_size=1, data_parallel_size=1, worker_cls=WORKERS["cpu"]),
        scheduler_config=SimpleNamespace(async_scheduling=False), device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=SimpleNamespace(mode=0, cudagraph_mode=None), attention_config=SimpleNamespace(backend=None),
        speculative_config=None, lora_config=None, kv_transfer_config=None, additional_config=additional_config(DEFAULT),
    )  # fmt: skip


def test_a_strict_configuration_passes(tmp_path: Path) -> None:
    assert require_supported(supported(tmp_path)) == CONFIG


def test_tensor_parallel_ranks_hold_whole_shards(tmp_path: Path) -> None:
    config = supported(tmp_path)
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = 2
    assert require_supported(config) == CONFIG
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = 3
    with pytest.raises(EngineRefusal, match="tensor_parallel_size=3: rollout_tp=3 does not divide the canonical 8"):
        require_supported(config)


@pytest.mark.parametrize(
    ("where", "value", "named"),
    [
        ("speculative_config", object(), "speculative decoding"),
        ("lora_config", object(), "LoRA"),
        ("kv_transfer_config", object(), "KV transfer"),
        ("model_config.quantization", "fp8", "quantization"),
        ("model_config.dtype", "torch.float16", "dtype torch.float16"),
        ("model_config.logits_processors", ["x"], "logits processors"),
        ("model_config.logprobs_mode", "raw_logprobs", "raw_logprobs"),
        ("model_config.architectures", ["Qwen3ForCausalLM"], "Qwen3ForCausalLM"),
        ("model_config.max_model_len", 513, "max_model_len=513"),
        ("cache_config.cache_dtype", "fp8", "KV cache dtype fp8"),
        ("parallel_config.world_size", 2, "2 ranks"),
        ("parallel_config.data_parallel_size", 4, "4 ranks"),
        ("parallel_config.worker_cls", "vllm.v1.worker.cpu_worker.CPUWorker", "worker class"),
        ("scheduler_config.async_scheduling", True, "asynchronous scheduling on the CPU"),
        ("device_config.device_type", "tpu", "device tpu"),
        ("attention_config.backend", "FLASH_ATTN", "attention backend FLASH_ATTN"),
        ("compilation_config.mode", 3, "compilation mode 3"),
        ("compilation_config.cudagraph_mode", SimpleNamespace(name="PIECEWISE"), "CUDA graph mode PIECEWISE"),
        ("additional_config", {}, "additional_config"),
    ],
)
def test_everything_else_is_refused_by_name(tmp_path: Path, where: str, value: Any, named: str) -> None:
    config = supported(tmp_path)
    *path, name = where.split(".")
    target = config
    for part in path:
        target = getattr(target, part)
    setattr(target, name, value)
    with pytest.raises(EngineRefusal, match=named):
        require_supported(config)


def on_a_card(directory: Path) -> Any:
    config = supported(directory)
    config.device_config.device_type, config.parallel_config.worker_cls = "cuda", WORKERS["cuda"]
    config.scheduler_config.async_scheduling, config.compilation_config.cudagraph_mode = True, SimpleNamespace(name="FULL_DECODE_ONLY")
    return config


def test_a_card_takes_graphs_for_decode_and_asynchronous_scheduling(tmp_path: Path) -> None:
    assert require_supported(on_a_card(tmp_path)) == CONFIG


def test_a_card_takes_several_ranks_and_its_own_worker(tmp_path: Path) -> None:
    config = on_a_card(tmp_path)
    config.parallel_config.tensor_parallel_size = config.parallel_config.world_size = 2
    assert require_supported(config) == CONFIG
    config = on_a_card(tmp_path)
    config.parallel_config.worker_cls = WORKERS["cpu"]
    with pytest.raises(EngineRefusal, match=r"worker class .*StrictCpuWorker"):
        require_supported(config)


def test_vllms_own_batch_invariant_mode_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(EngineRefusal, match="VLLM_BATCH_INVARIANT"):
        require_supported(supported(tmp_path))


def wanted(**changed: Any) -> Wanted:
    asked: dict[str, Any] = {
        "checkpoint": Path("model"), "mode": "strict", "device": "cuda", "eager": False, "cudagraph_sizes": (1, 4), "numerics": HOPPER,
        "max_model_len": 512, "max_num_batched_tokens": 64, "max_num_seqs": 8, "kv_cache_bytes": 1 << 20, "seed": 0,
        "tensor_parallel_size": 1,
    }  # fmt: skip
    return Wanted(**{**asked, **changed})


def test_a_strict_card_compiles_nothing_and_captures_what_is_asked_for() -> None:
    given, found = wanted().arguments(), wanted().read_back(36)
    assert given["compilation_config"] == {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 4]}
    assert (found["cudagraph_mode"], found["cudagraph_sizes"], found["compile_mode"]) == ("FULL_DECODE_ONLY", [1, 4], 0)
    assert (given["worker_cls"], found["worker"]) == (WORKERS["cuda"], WORKERS["cuda"])
    assert numerics_of(SimpleNamespace(additional_config=given["additional_config"])) == HOPPER
    eager = wanted(eager=True, cudagraph_sizes=())
    assert eager.arguments()["compilation_config"] == {"mode": 0, "cudagraph_mode": "NONE"}
    eager.require_captured([])
    wanted().require_captured([{"rows": 1, "replays": 0}, {"rows": 4, "replays": 0}])
    with pytest.raises(EngineRefusal, match=r"captured graphs of \[1\] rows, asked for \[1, 4\]"):
        wanted().require_captured([{"rows": 1, "replays": 0}])


def test_a_native_engine_is_told_nothing_about_graphs_or_workers() -> None:
    given = wanted(mode="native").arguments()
    assert not {"compilation_config", "worker_cls", "block_size", "hf_overrides", "additional_config", "async_scheduling"} & set(given)
    assert wanted(mode="native").read_back(36)["attention"] == ["vllm.v1.attention.backends.flash_attn.FlashAttentionImpl"]
    assert "compile_mode" not in wanted(mode="native").read_back(36)
    wanted(mode="native").require_captured([])


def test_contradictions_are_refused() -> None:
    for changed, named in (
        ({"mode": "both"}, "neither 'strict' nor 'native'"),
        ({"device": "tpu"}, "neither 'cpu' nor 'cuda'"),
        ({"device": "cpu"}, "enforce_eager=False on the CPU"),
        ({"mode": "ffn", "eager": True, "tensor_parallel_size": 2}, "mode='ffn' with tensor_parallel_size=2: run a mixed engine on one"),
        ({"transport": "gloo"}, "transport='gloo' does not move bytes between ranks of vLLM on cuda: use peer or nccl"),
        ({"device": "cpu", "eager": True, "transport": "peer"}, "transport='peer' does not .* on cpu: use gloo"),
    ):
        with pytest.raises(EngineRefusal, match=named):
            wanted(**changed)


def test_ranks_on_cards_write_each_others_memory_unless_told_otherwise() -> None:
    for changed, expected in (({}, "peer"), ({"transport": "nccl"}, "nccl"), ({"device": "cpu", "eager": True}, "gloo")):
        given = wanted(tensor_parallel_size=2, **changed).arguments()
        assert transport_of(SimpleNamespace(additional_config=given["additional_config"])) == expected
        assert given["disable_custom_all_reduce"] is True
    assert "distributed_executor_backend" not in wanted().arguments()
    assert wanted(mode="native", tensor_parallel_size=2).arguments()["disable_custom_all_reduce"] is False


def test_default_graphs_reach_exactly_to_the_largest_step() -> None:
    assert default_cudagraph_sizes(1) == [1]
    assert default_cudagraph_sizes(10) == [1, 2, 4, 8, 10]
    assert default_cudagraph_sizes(1024)[-2:] == [496, LARGEST_GRAPH]


def test_tied_embeddings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        require_supported(supported(tmp_path, tie_word_embeddings=True))


def test_numerics_survive_the_journey_as_json() -> None:
    numerics = Numerics(canonical_tp=4, kv_tile=16, kv_split=0, attention_family="vendor-one-split")
    config: Any = SimpleNamespace(additional_config=json.loads(json.dumps(additional_config(numerics))))
    assert numerics_of(config) == numerics
    config.additional_config["rlk"]["numerics"]["contract_version"] = 0
    with pytest.raises(EngineRefusal, match="contract version 0"):
        numerics_of(config)


def test_a_prompt_that_does_not_fit_is_a_refused_sample() -> None:
    make = lambda *ids: Request(0, ids, SamplingParams())
    assert refusal(make(*range(7)), 10, 8) is None
    assert refusal(make(*range(8)), 10, 8) == "refused: a prompt of 8 tokens leaves no room in a context of 8"
    assert refusal(make(10), 10, 8) == "refused: prompt id 10 is outside the vocabulary of 10"


def test_stop_ids_come_from_the_checkpoint(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert eos_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    assert eos_token_ids(tmp_path) == (3, 4)


_PLUGIN_EFFECT = """
import importlib.metadata, json, sys
from vllm import ModelRegistry
from vllm.model_executor.models.registry import ModelRegistry as registry
from vllm.plugins import load_general_plugins
stock = dict(registry.models)
modules = set(sys.modules)
load_general_plugins()
print(json.dumps({
    "entry": [point.value for point in importlib.metadata.entry_points(group="vllm.general_plugins", name="rlk")],
    "added": sorted(set(registry.models) - set(stock)),
    "replaced": [name for name in stock if registry.models[name] is not stock[name]],
    "imported": sorted(name for name in set(sys.modules) - modules if name.split(".")[0] == "rlk"),
}))
"""


@pytest.mark.slow
def test_the_installed_plugin_only_adds_names() -> None:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", _PLUGIN_EFFECT], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    effect = json.loads(done.stdout.splitlines()[-1])
    assert effect["entry"] == ["rlk.rollout.vllm.plugin:register"]
    assert effect["added"] == [MIXED_ARCHITECTURE, ARCHITECTURE]
    assert effect["replaced"] == []
    assert set(effect["imported"]) <= {"rlk", "rlk.rollout", "rlk.rollout.vllm", "rlk.rollout.vllm.plugin"}
