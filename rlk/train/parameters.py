"""Packed weight names of the model against Megatron's parameter names."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rlk.model.config import CheckpointError

_TOP = {"embedding": "embedding.word_embeddings.weight", "final_norm": "decoder.final_layernorm.weight", "lm_head": "output_layer.weight"}
_LAYER = {
    "input_norm": "input_layernorm",
    "qkv": "self_attention.linear_qkv",
    "q_norm": "self_attention.q_layernorm",
    "k_norm": "self_attention.k_layernorm",
    "o_proj": "self_attention.linear_proj",
    "post_norm": "pre_mlp_layernorm",
    "gate_up": "mlp.linear_fc1",
    "down_proj": "mlp.linear_fc2",
}


def megatron_name(packed: str) -> str:
    """Name of the Megatron parameter that holds a packed weight, "layers.3.qkv" -> "decoder.layers.3.self_attention.linear_qkv.weight"."""
    if packed in _TOP:
        return _TOP[packed]
    prefix, _, name = packed.rpartition(".")
    return f"decoder.{prefix}.{_LAYER[name]}.weight"


def named_parameters(model: torch.nn.Module, packed: Mapping[str, torch.Tensor]) -> dict[str, torch.nn.Parameter]:
    """Megatron's parameters by packed name, in the order of ``packed``; raises CheckpointError where the two sets differ."""
    found = dict(model.named_parameters())
    wanted = {name: megatron_name(name) for name in packed}
    odd = sorted(set(found) ^ set(wanted.values()))
    if odd:
        raise CheckpointError(
            f"Megatron's model and the checkpoint differ in {', '.join(odd[:3])}: build it from the checkpoint's config.json"
        )
    return {name: found[theirs] for name, theirs in wanted.items()}


def load(parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy tensors into the parameters of the same names; raises CheckpointError on another shape or dtype."""
    for name, parameter in parameters.items():
        tensor = tensors[name]
        if tensor.shape != parameter.shape or tensor.dtype != parameter.dtype:
            raise CheckpointError(
                f"{name}: Megatron's parameter is {list(parameter.shape)} {parameter.dtype}, the weight {list(tensor.shape)} {tensor.dtype}"
            )
        parameter.data.copy_(tensor)


def prepare_gradients(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Write its packed name and an fp32 main gradient of +0 on every parameter."""
    for name, parameter in parameters.items():
        parameter.rlk_name = name  # type: ignore[attr-defined]
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)  # type: ignore[attr-defined]
