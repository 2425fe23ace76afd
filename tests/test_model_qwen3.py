"""The one forward pass: accurate against transformers in fp32, invariant to packing, and wired for gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from transformers import Qwen3Config as ReferenceConfig
from transformers import Qwen3ForCausalLM

from rlk.contract.numerics import Numerics
from rlk.kernels.attention import attention
from rlk.kernels.lm_head import lm_head
from rlk.kernels.rms_norm import rms_norm
from rlk.model.config import CheckpointError, Qwen3Config
from rlk.model.layout import hf_shapes, packed_shapes
from rlk.model.qwen3 import Qwen3Dense, Qwen3Layer, decoder_layer, split_qkv
from rlk.model.trace import Trace

NUMERICS = Numerics()
CONFIG = Qwen3Config(
    vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=8,
    head_dim=16, rms_norm_eps=1e-6, rope_theta=1e4, max_position_embeddings=96,
)  # fmt: skip
LENGTHS = (33, 5, 1)
bits = lambda t: t.contiguous().view(torch.uint8)


@functools.cache
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    normal = lambda shape: torch.randn(shape, generator=generator)
    return {n: (1 + 0.2 * normal(s) if len(s) == 1 else 0.15 * normal(s)).bfloat16() for n, s in hf_shapes(CONFIG).items()}


def dense(config: Qwen3Config = CONFIG, numerics: Numerics = NUMERICS) -> Qwen3Dense:
    model = Qwen3Dense(config, numerics)
    model.load_hf(tensors())
    return model


@functools.cache
def reference() -> Qwen3ForCausalLM:
    facts = {k: v for k, v in CONFIG.to_dict().items() if "dtype" not in k}
    model = Qwen3ForCausalLM(ReferenceConfig(**facts, attn_implementation="eager"))
    model.load_state_dict({name: tensor.float() for name, tensor in tensors().items()})
    return model


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, CONFIG.vocab_size, (length,), generator=generator) for length in lengths]


def attend(lengths: list[int]) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    edges = torch.tensor([0, *lengths]).cumsum(0)
    options = {"scale": CONFIG.attention_scale, "kv_tile": NUMERICS.kv_tile, "kv_split": NUMERICS.kv_split}
    return lambda q, k, v: attention(q, k, v, edges, **options).flatten(1)


def run(model: Qwen3Dense, parts: list[torch.Tensor], trace: Trace | None = None) -> torch.Tensor:
    op = attend([len(p) for p in parts])
    hidden = model(torch.cat(parts), torch.cat([torch.arange(len(p)) for p in parts]), lambda _, q, k, v: op(q, k, v), trace)
    return model.logits(hidden, trace)


def test_logits_agree_with_transformers() -> None:
    parts = sequences()
    logits = run(dense(), parts)
    assert logits.dtype == torch.float32
    assert logits.shape == (sum(LENGTHS), CONFIG.vocab_size)
    with torch.no_grad():
        expected = torch.cat([reference()(part[None]).logits[0] for part in parts])
    error = lambda got: ((got - expected).norm() / expected.norm()).item()
    assert error(logits) < 0.02
    assert error(logits.roll(1, dims=0)) > 0.5


@pytest.mark.parametrize("tp", [1, 8])
def test_a_sequence_alone_gives_the_bytes_of_the_packed_one(tp: int) -> None:
    model, parts = dense(numerics=Numerics(canonical_tp=tp)), sequences()
    packed = run(model, parts).split(LENGTHS)
    for part, expected in zip(parts, packed):
        assert torch.equal(bits(run(model, [part])), bits(expected))
    assert not torch.equal(bits(run(model, [parts[0].roll(1)])), bits(packed[0]))


def test_trace_names_every_intermediate_and_changes_no_byte() -> None:
    model, parts, trace = dense(), sequences(), Trace()
    assert torch.equal(bits(run(model, parts, trace)), bits(run(model, parts)))
    attention_steps = ["input_norm", "qkv", "v", "q_norm", "q_rope", "k_norm", "k_rope", "attention", "o_proj", "attn_residual"]
    steps = [*attention_steps, "post_norm", "gate_up", "swiglu", "down_proj", "mlp_residual"]
    names = ["embedding", *(f"layers.{i}.{step}" for i in range(2) for step in steps), "final_norm", "logits"]
    assert list(trace.names()) == names
    rows = sum(LENGTHS)
    assert all(tensor.shape[0] == rows for tensor in trace.tensors().values())
    assert trace.tensor("layers.1.q_rope").shape == (rows, 16, 16)
    run(model, [parts[2]], trace)
    assert trace.tensor("layers.1.v").shape == (rows + 1, 8, 16)


def test_gradient_of_the_input_agrees_with_transformers() -> None:
    model, part = dense(), sequences()[0]
    weight = torch.randn(len(part), CONFIG.vocab_size, generator=torch.Generator().manual_seed(9)).bfloat16()
    start = model.embedding[part].clone().requires_grad_()
    x, positions = start, torch.arange(len(part))
    for i, layer in enumerate(model.layers):
        assert isinstance(layer, Qwen3Layer)
        ops = layer.ops(attend([len(part)]), CONFIG, NUMERICS)
        x = decoder_layer(x, ops, positions, model.rope_table, CONFIG, NUMERICS, None, f"layers.{i}.")
    logits = lm_head(rms_norm(x, model.final_norm, CONFIG.rms_norm_eps), model.lm_head, grad_splits=8)[:, : CONFIG.vocab_size]
    logits.backward(weight.float())
    theirs = start.detach().float().requires_grad_()
    reference()(inputs_embeds=theirs[None]).logits[0].backward(weight.float())
    assert start.grad is not None
    assert theirs.grad is not None
    assert start.grad.dtype == torch.bfloat16
    assert (start.grad.float() - theirs.grad).norm() / theirs.grad.norm() < 0.03


def test_split_qkv_cuts_per_group_and_keeps_the_sign_of_zero_in_gradients() -> None:
    packed = torch.arange(2 * 8 * 4 * 16).reshape(2, -1).bfloat16().requires_grad_()
    q, k, v = split_qkv(packed, CONFIG)
    assert (q.shape, k.shape, v.shape) == ((2, 16, 16), (2, 8, 16), (2, 8, 16))
    groups = packed.reshape(2, 8, 4, 16)
    assert torch.equal(q[:, 6:8], groups[:, 3, :2])
    assert torch.equal(k[:, 3], groups[:, 3, 2])
    assert torch.equal(v[:, 3], groups[:, 3, 3])
    local = split_qkv(packed[:, : packed.shape[1] // 2], CONFIG)
    assert all(torch.equal(half, whole[:, : half.shape[1]]) for half, whole in zip(local, (q, k, v)))
    torch.autograd.backward([q, k, v], [torch.full_like(t, -0.0) for t in (q, k, v)])
    assert packed.grad is not None
    assert (packed.grad.view(torch.int16) == -(2**15)).all()


def test_parameters_carry_the_packed_names_and_take_no_gradient() -> None:
    model = Qwen3Dense(CONFIG, NUMERICS, max_positions=40)
    parameters = dict(model.named_parameters())
    assert {name: tuple(p.shape) for name, p in parameters.items()} == packed_shapes(CONFIG, NUMERICS)
    assert not any(p.requires_grad for p in parameters.values())
    assert all(p.isnan().all() for p in parameters.values())
    assert set(model.state_dict()) == set(parameters)
    assert model.rope_table.shape == (2, 40, 8)


def test_weights_are_read_back_exactly_and_broken_ones_refused() -> None:
    model = dense()
    for name, tensor in model.hf_tensors().items():
        assert torch.equal(bits(tensor), bits(tensors()[name])), name
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        model.load_hf({name: t for name, t in tensors().items() if name != "lm_head.weight"})


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(IndexError):
        run(dense(), [torch.tensor([3, CONFIG.vocab_size])])
