"""The forward pass of ``rlk.model.qwen3`` for an engine that keeps keys and values in pages: the same bytes in fewer launches.

Between two matrix products stands one fused step (``rlk.kernels.serving``), which may not change a byte of the operators it is made of.
Nothing is traced here: who wants intermediates runs ``Qwen3Dense.forward``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from rlk.kernels.overlap import overlapped
from rlk.kernels.rms_norm import rms_norm
from rlk.kernels.serving import add_rms_norm
from rlk.kernels.swiglu import swiglu
from rlk.model.linear import vocabulary_embedding
from rlk.model.qwen3 import Qwen3Dense, held_shards

OVERLAPPED_ROWS = 256
"""Launches of longer steps do not overlap: their blocks fill the card, and it is the end of a launch that overlapping shortens."""
AttendPacked = Callable[[int, torch.Tensor], torch.Tensor]
"""(layer, qkv [T, groups·(g+2)·D] before q/k norm) -> attention's output [T, Hq·D]; normalises, rotates, stores and attends."""


def serve(dense: Qwen3Dense, ids: torch.Tensor, attend: AttendPacked) -> torch.Tensor:
    """ids int64 [T] -> final-norm hidden states bf16 [T, H]: the bytes of :meth:`Qwen3Dense.forward`."""
    config, numerics, eps = dense.config, dense.numerics, dense.config.rms_norm_eps
    x = vocabulary_embedding(ids, dense.embedding, config.vocab_size, dense.tp)
    layers = dense.decoder_layers()
    normed = rms_norm(x, layers[0].input_norm, eps)
    with overlapped(ids.device) if len(ids) <= OVERLAPPED_ROWS else nullcontext():
        for i, layer in enumerate(layers):
            ops = layer.ops(lambda *heads: heads[0], config, numerics, dense.tp)
            x, normed = add_rms_norm(x, ops.o_proj(attend(i, ops.qkv(normed))), layer.post_norm, eps)
            gate_up = ops.gate_up(normed)
            following = layers[i + 1].input_norm if i + 1 < len(layers) else dense.final_norm
            x, normed = add_rms_norm(x, ops.down_proj(swiglu(gate_up, held_shards(gate_up, config, numerics))), following, eps)
    return normed
