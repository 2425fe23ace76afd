"""Qwen3Config: both spellings of rope_theta are read, everything that would change the mathematics is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlk.contract.numerics import ContractError, Numerics
from rlk.model.config import CheckpointError, Qwen3Config

QWEN3_8B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "rope_scaling": None, "attention_bias": False, "tie_word_embeddings": False, "use_sliding_window": False,
    "sliding_window": None, "max_window_layers": 36, "hidden_act": "silu", "torch_dtype": "bfloat16", "architectures": ["Qwen3ForCausalLM"],
}  # fmt: skip


def test_rope_theta_of_both_transformers_generations() -> None:
    old = Qwen3Config.from_dict(QWEN3_8B)
    new = {**QWEN3_8B, "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"}}
    del new["rope_theta"]
    assert Qwen3Config.from_dict(new) == old
    assert old.rope_theta == 1e6
    assert old.padded_vocab(Numerics()) == 152576
    assert old.attention_scale == 128**-0.5


def test_written_config_is_read_back_and_understood_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = Qwen3Config.from_dict(QWEN3_8B)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert Qwen3Config.from_json(tmp_path) == Qwen3Config.from_json(tmp_path / "config.json") == config
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.model_type == "qwen3"
    assert theirs.rope_parameters["rope_theta"] == 1e6
    assert (theirs.head_dim, theirs.tie_word_embeddings, str(theirs.dtype)) == (128, False, "torch.bfloat16")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model_type": "qwen3_moe"}, "model_type='qwen3_moe'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings"),
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"torch_dtype": "float32"}, "dtype='float32'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear' RoPE scaling"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "'yarn' RoPE scaling"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "given twice"),
        ({"rope_parameters": 7}, "must be an object"),
        ({"rope_theta": None}, "rope_theta missing"),
        ({"rope_theta": -1.0}, "rope_theta=-1.0"),
        ({"head_dim": None}, "head_dim missing"),
        ({"head_dim": 31}, "head_dim=31"),
        ({"hidden_size": "4096"}, "hidden_size='4096'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan"),
    ],
)
def test_refusals_name_the_field_in_one_line(tmp_path: Path, change: dict[str, Any], names: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN3_8B, **change}))
    with pytest.raises(CheckpointError) as error:
        Qwen3Config.from_json(tmp_path)
    assert names in str(error.value)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("content", "says"), [(None, "cannot read"), ("{", "not valid JSON"), ("[]", "must hold a JSON object")])
def test_unreadable_config(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=says):
        Qwen3Config.from_json(tmp_path)


def test_canonical_tp_must_divide_what_it_splits() -> None:
    config = Qwen3Config.from_dict({**QWEN3_8B, "num_key_value_heads": 4})
    with pytest.raises(ContractError, match="num_key_value_heads=4"):
        config.require(Numerics(canonical_tp=8))
    config.require(Numerics(canonical_tp=4))
