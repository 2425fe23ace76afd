"""Linear layers and embedding of a tensor parallel rank: it holds whole canonical shards and adds its part through the pair tree.

In a TP group of one these are the plain operators on whole weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from rlk.kernels.checked import check_once
from rlk.kernels.det_gemm import det_gemm, det_gemm_input_part
from rlk.kernels.embedding import embedding
from rlk.kernels.embedding.cpu import check_ids
from rlk.kernels.lm_head import lm_head, lm_head_input_part
from rlk.parallel.collectives import Group

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
InputPart = Callable[..., torch.Tensor]


def column(x: torch.Tensor, w: torch.Tensor, shards: int, tp: Group) -> torch.Tensor:
    """x [T, K] · wᵀ, w [N of this rank, K], ``shards`` of them: plain order. Input gradient: split order over all ranks' shards."""
    if tp.size == 1:
        return det_gemm(x, w, grad_splits=shards)
    result: torch.Tensor = _Column.apply(x, w, shards, tp, det_gemm, det_gemm_input_part)
    return result


def output(x: torch.Tensor, w: torch.Tensor, shards: int, tp: Group) -> torch.Tensor:
    """lm_head: like :func:`column`, with fp32 logits of this rank's vocabulary shards."""
    if tp.size == 1:
        return lm_head(x, w, grad_splits=shards)
    result: torch.Tensor = _Column.apply(x, w, shards, tp, _logits, lm_head_input_part)
    return result


def joined(columns: torch.Tensor, tp: Group) -> torch.Tensor:
    """All ranks' columns side by side, [T, N] from [T, N of each rank]."""
    return columns if tp.size == 1 else torch.cat(list(tp.all_gather_many([columns])[0]), dim=1)


def row(x: torch.Tensor, w: torch.Tensor, shards: int, tp: Group) -> torch.Tensor:
    """x [T, K of this rank] · wᵀ, w [N, K of this rank]: split order over all ranks' shards, whole on every rank. Input gradient: plain."""
    if tp.size == 1:
        return det_gemm(x, w, splits=shards)
    result: torch.Tensor = _Join.apply(det_gemm(x, w, splits=shards, out_dtype=torch.float32), tp)
    return result


def vocabulary_embedding(ids: torch.Tensor, w: torch.Tensor, vocab_size: int, tp: Group) -> torch.Tensor:
    """Rows of the ids [T], each taken from the rank that holds it: bytes are moved, never added to zeros, which would lose a −0.

    w: [rows of this rank, H]. Raises IndexError on every rank for an id outside [0, vocab_size).
    """
    if tp.size == 1:
        return embedding(ids, w, vocab_size)
    check_once(ids, ("embedding", vocab_size), lambda: check_ids(ids, vocab_size))
    each = w.shape[0]
    mine = embedding((ids - tp.rank * each).clamp(0, each - 1), w, each)
    (rows,) = tp.all_gather_many([mine])
    result: torch.Tensor = rows[ids // each, torch.arange(len(ids), device=ids.device)]
    return result


def _logits(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return lm_head(x, w, grad_splits=1)


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, shards: int, tp: Group, product: Product, input_part: InputPart):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(w)
        ctx.shards, ctx.tp, ctx.input_part = shards, tp, input_part
        return product(x, w)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        (w,) = ctx.saved_tensors
        part = ctx.input_part(dy, w, splits=ctx.shards)
        return ctx.tp.tree_all_reduce(part, torch.bfloat16), None, None, None, None, None


class _Join(torch.autograd.Function):
    """fp32 parts of the ranks to their bf16 sum; the gradient of every part is that of the sum."""

    @staticmethod
    def forward(ctx, part, tp: Group):  # type: ignore[no-untyped-def]
        return tp.tree_all_reduce(part, torch.bfloat16)

    @staticmethod
    def backward(ctx, dy):  # type: ignore[no-untyped-def]
        return dy.float(), None
