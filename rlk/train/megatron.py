"""What both trainer modes share: Megatron's settings and the type of a loss derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rlk.contract.topology import Topology
from rlk.model.config import Qwen3Config

CPU = torch.device("cpu")

Seeds = Callable[[torch.Tensor], torch.Tensor]
"""From the fp32 scores of a micro-batch's targets to dL/dlogp of each, on the same device."""


def megatron_settings(
    config: Qwen3Config,
    topology: Topology = Topology(),  # noqa: B008 (frozen)
    device: torch.device = CPU,
) -> dict[str, Any]:
    """Keyword arguments for a TransformerConfig of a Qwen3 dense model, bf16, without dropout or fusions.

    Weights are allocated and not initialised: they come from a checkpoint.
    """
    return {
        "tensor_model_parallel_size": topology.tp,
        "context_parallel_size": topology.cp,
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "layernorm_epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "pipeline_dtype": torch.bfloat16,
        "use_cpu_initialization": device.type == "cpu",
        "perform_initialization": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
    }
