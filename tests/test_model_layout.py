"""Packed layout: exact inverse of the checkpoint layout, and canonical shards are contiguous rows."""

from __future__ import annotations

import pytest
import torch

from rlk.contract.numerics import Numerics
from rlk.model.config import CheckpointError, Qwen3Config
from rlk.model.layout import hf_shapes, pack_weights, packed_shapes, unpack_weights

CONFIG = Qwen3Config(
    vocab_size=37, hidden_size=24, intermediate_size=48, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    head_dim=4, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=64,
)  # fmt: skip


def weights(config: Qwen3Config = CONFIG, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random bit patterns: NaN payloads, infinities and -0 must survive, too."""
    generator = torch.Generator().manual_seed(seed)
    bits = lambda shape: torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16).view(torch.bfloat16)
    return {name: bits(shape) for name, shape in hf_shapes(config).items()}


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_round_trip_is_exact(tp: int) -> None:
    numerics, hf = Numerics(canonical_tp=tp), weights()
    packed = pack_weights(hf, CONFIG, numerics)
    assert {name: tuple(t.shape) for name, t in packed.items()} == packed_shapes(CONFIG, numerics)
    back = unpack_weights(packed, CONFIG, numerics)
    assert list(back) == list(hf)
    for name, tensor in hf.items():
        assert torch.equal(back[name].view(torch.int16), tensor.view(torch.int16)), name
    again = pack_weights(back, CONFIG, numerics)
    for name, tensor in packed.items():
        assert torch.equal(again[name].view(torch.int16), tensor.view(torch.int16)), name


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_contiguous_slice_of_rows_is_the_packing_of_that_shard_alone(tp: int) -> None:
    numerics, hf = Numerics(canonical_tp=8), weights()
    packed = pack_weights(hf, CONFIG, numerics)
    rows = lambda t, rank: t.chunk(tp)[rank]
    for rank in range(tp):
        queries, keys, values = (rows(hf[f"model.layers.1.self_attn.{kind}_proj.weight"], rank) for kind in "qkv")
        expected = []
        for group in range(8 // tp):
            expected += [queries[8 * group : 8 * group + 8], keys[4 * group : 4 * group + 4], values[4 * group : 4 * group + 4]]
        assert torch.equal(rows(packed["layers.1.qkv"], rank).view(torch.int16), torch.cat(expected).view(torch.int16))
        gate, up = (rows(hf[f"model.layers.1.mlp.{kind}_proj.weight"], rank).chunk(8 // tp) for kind in ("gate", "up"))
        expected = [part for pair in zip(gate, up) for part in pair]
        assert torch.equal(rows(packed["layers.1.gate_up"], rank).view(torch.int16), torch.cat(expected).view(torch.int16))


def test_padding_rows_are_positive_zero_and_guarded() -> None:
    packed = pack_weights(weights(), CONFIG, Numerics())
    assert packed["embedding"].shape[0] == packed["lm_head"].shape[0] == 1024
    assert not packed["lm_head"][37:].view(torch.int16).any()
    packed["lm_head"][40, 3] = -0.0
    with pytest.raises(CheckpointError, match="lm_head has a padding row"):
        unpack_weights(packed, CONFIG, Numerics())


def test_wrong_tensors_are_named() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        pack_weights({k: v for k, v in weights().items() if k != name}, CONFIG, Numerics())
    with pytest.raises(CheckpointError, match=f"{name} has shape"):
        pack_weights({**weights(), name: torch.zeros(24, 48)}, CONFIG, Numerics())
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.layers\.0\.self_attn\.q_proj\.bias"):
        pack_weights({**weights(), "model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, CONFIG, Numerics())
    with pytest.raises(CheckpointError, match=r"layers\.0\.qkv is missing"):
        unpack_weights({k: v for k, v in pack_weights(weights(), CONFIG, Numerics()).items() if k != "layers.0.qkv"}, CONFIG, Numerics())
