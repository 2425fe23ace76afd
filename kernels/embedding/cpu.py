"""CPU backend of embedding as a ``torch.library`` operator; arithmetic in embedding.cpp."""

from __future__ import annotations

from pathlib import Path

import torch

from rlk.kernels._native import NativeLibrary

LIBRARY = NativeLibrary("embedding", Path(__file__).with_name("embedding.cpp"))


def check_ids(ids: torch.Tensor, size: int, named: torch.Tensor | None = None) -> None:
    """Raise for the first id outside [0, size) among all positions, or among those in ``named``."""
    outside = (ids < 0) | (ids >= size)
    bad = outside.nonzero()[:, 0] if named is None else named[outside[named]]
    if bad.numel():
        at = int(bad[0])
        raise IndexError(f"embedding: id {int(ids[at])} at position {at} is outside 0…{size - 1}: drop masked tokens before the lookup")


@torch.library.custom_op("rlk::embedding", mutates_args=(), device_types="cpu")
def embedding(ids: torch.Tensor, weight: torch.Tensor, vocab_size: int) -> torch.Tensor:
    check_ids(ids, vocab_size)
    tokens, width = ids.numel(), weight.shape[1]
    y = weight.new_empty(tokens, width)
    LIBRARY.call("embedding_forward", ids.contiguous(), weight.contiguous(), y, tokens, width)
    return y


@embedding.register_fake
def _(ids: torch.Tensor, weight: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return weight.new_empty(ids.shape[0], weight.shape[1])


def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    """Nothing is kept: neither ids nor weight have a gradient here."""


def backward(ctx, dy):  # type: ignore[no-untyped-def]
    return None, None, None


embedding.register_autograd(backward, setup_context=setup)


def weight_grad(ids: torch.Tensor, dy: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
    at = (index >= 0).nonzero()[:, 0]
    token, leaf = index[at], torch.searchsorted(offsets[1:], at, right=True)
    check_ids(ids, rows, token)
    used, order = torch.sort(ids[token], stable=True)
    run_ids, counts = torch.unique_consecutive(used, return_counts=True)
    begin = torch.cat((counts.new_zeros(1), counts.cumsum(0)))
    dweight = dy.new_zeros(rows, dy.shape[1], dtype=torch.float32)
    LIBRARY.call(
        "embedding_weight_grad", run_ids, begin, token[order], leaf[order], dy.contiguous(), dweight,
        run_ids.numel(), offsets.numel() - 1, dy.shape[1], op="embedding.weight_grad",
    )  # fmt: skip
    return dweight
