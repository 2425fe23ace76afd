"""embedding: one weight row per token."""

from __future__ import annotations

import torch

from rlk.kernels._triton import from_triton
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.embedding import cpu
from rlk.kernels.leaves import check_leaves

_FORWARD: Backends = {"cpu": cpu.embedding, "triton": from_triton("embedding", "embedding")}
_WEIGHT_GRAD: Backends = {"cpu": cpu.weight_grad, "triton": from_triton("embedding", "weight_grad")}


def embedding(ids: torch.Tensor, weight: torch.Tensor, vocab_size: int, *, backend: str | None = None) -> torch.Tensor:
    """Copy weight[ids[t]] for every token: the owner's bytes, −0 included.

    ids: [T] int64; weight: [V, H] bf16, V >= vocab_size (the rest is padding); returns [T, H] bf16.
    Autograd gives the weight no gradient: it is :func:`embedding_weight_grad`, in fp32.
    Raises IndexError naming the first id outside [0, vocab_size) before anything is launched, ValueError on a wrong shape or dtype,
    BackendUnavailable for a backend that cannot run here. In a captured graph, which cannot raise, the row of such an id is NaN.
    """
    if ids.dtype != torch.int64 or ids.ndim != 1 or weight.dtype != torch.bfloat16 or weight.ndim != 2 or vocab_size > weight.shape[0]:
        raise ValueError(
            f"embedding: ids {tuple(ids.shape)} {ids.dtype} must be int64 [tokens] "
            f"and weight {tuple(weight.shape)} {weight.dtype} bf16 [at least {vocab_size}, width]"
        )
    result: torch.Tensor = select("embedding", _FORWARD, backend, ids.device)(ids, weight, vocab_size)
    return result


def embedding_weight_grad(
    ids: torch.Tensor,
    dy: torch.Tensor,
    leaf_index: torch.Tensor,
    leaf_offsets: torch.Tensor,
    rows: int,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Gradient of the embedding weight, [rows, H] fp32; a row whose id no token has is +0.

    ids: [T] int64; dy: [T, H] bf16; leaf_index, leaf_offsets as in rms_norm_gamma_grad; tokens that the leaves do not name take no
    part, so a vocabulary shard passes −1 for the tokens of other shards. Reduction order per id: in each leaf one fp32 accumulator
    from +0, tokens ascending in leaf order; tree of adjacent pairs over leaves.
    Raises IndexError for a named token's id outside [0, rows), ValueError on a wrong shape or dtype or on leaves that name other rows.
    """
    if ids.dtype != torch.int64 or ids.ndim != 1 or dy.dtype != torch.bfloat16 or dy.ndim != 2 or dy.shape[:1] != ids.shape:
        raise ValueError(
            f"embedding_weight_grad: ids {tuple(ids.shape)} {ids.dtype} must be int64 [tokens] "
            f"and dy {tuple(dy.shape)} {dy.dtype} bf16 [tokens, width]"
        )
    check_leaves("embedding_weight_grad", leaf_index, leaf_offsets, ids)
    result: torch.Tensor = select("embedding.weight_grad", _WEIGHT_GRAD, backend, ids.device)(ids, dy, leaf_index, leaf_offsets, rows)
    return result
