"""CPU backend of logp as ``torch.library`` operators; arithmetic in logp.cpp."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rlk.kernels._native import NativeLibrary

if TYPE_CHECKING:
    from rlk.kernels.logp.shards import Columns

LIBRARY = NativeLibrary("logp", Path(__file__).with_name("logp.cpp"))


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


@torch.library.custom_op("rlk::logp", mutates_args=(), device_types="cpu")
def logp(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    support: torch.Tensor | None,
    active: torch.Tensor | None,
    vocab_size: int,
    padded_vocab: int,
    shards: int,
    vocab_tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, width = logits.shape
    out, lse = logits.new_empty(rows), logits.new_empty(rows)
    LIBRARY.call(
        "logp_forward", logits.contiguous(), ids.contiguous(), temperature.contiguous(), _contiguous(support), _contiguous(active),
        out, lse, rows, width, vocab_size, padded_vocab, shards, vocab_tile,
    )  # fmt: skip
    return out, lse


@logp.register_fake
def _(logits, ids, temperature, support, active, vocab_size, padded_vocab, shards, vocab_tile):  # type: ignore[no-untyped-def]
    return logits.new_empty(logits.shape[0]), logits.new_empty(logits.shape[0])


@torch.library.custom_op("rlk::logp_backward", mutates_args=(), device_types="cpu")
def logp_backward(
    logits: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    support: torch.Tensor | None,
    active: torch.Tensor | None,
    lse: torch.Tensor,
    seed: torch.Tensor,
    vocab_size: int,
) -> torch.Tensor:
    dlogits = torch.empty_like(logits, memory_format=torch.contiguous_format)
    LIBRARY.call(
        "logp_backward", logits.contiguous(), ids.contiguous(), temperature.contiguous(), _contiguous(support), _contiguous(active),
        lse.contiguous(), seed.contiguous(), dlogits, *logits.shape, vocab_size, op="logp.backward",
    )  # fmt: skip
    return dlogits


@logp_backward.register_fake
def _(logits, ids, temperature, support, active, lse, seed, vocab_size):  # type: ignore[no-untyped-def]
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    logits, ids, temperature, support, active, ctx.vocab_size, *_ = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(logits, ids, temperature, support, active, lse)


def backward(gradient: Callable[..., torch.Tensor], ctx, seed, _lse_grad):  # type: ignore[no-untyped-def]
    logits, ids, temperature, support, active, lse = ctx.saved_tensors
    dlogits = gradient(logits, ids, temperature, support, active, lse, seed, ctx.vocab_size)
    return dlogits, None, None, None, None, None, None, None, None


logp.register_autograd(partial(backward, logp_backward), setup_context=setup)


def part(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None, active: torch.Tensor | None,
    columns: Columns, vocab_tile: int,
) -> torch.Tensor:  # fmt: skip
    state = logits.new_empty(len(logits), 3)
    LIBRARY.call(
        "logp_part", logits.contiguous(), ids - columns.first, temperature.contiguous(), _contiguous(support), _contiguous(active),
        state, len(logits), columns.real, columns.shard_width, columns.shards, vocab_tile,
    )  # fmt: skip
    return state


def join(parts: torch.Tensor, ids: torch.Tensor, active: torch.Tensor | None, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    ranks, rows, _ = parts.shape
    out, lse = parts.new_empty(rows), parts.new_empty(rows)
    LIBRARY.call("logp_join", parts.contiguous(), ids.contiguous(), _contiguous(active), out, lse, ranks, rows, width)
    return out, lse


def part_gradient(
    logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None, active: torch.Tensor | None,
    lse: torch.Tensor, seed: torch.Tensor, columns: Columns,
) -> torch.Tensor:  # fmt: skip
    result: torch.Tensor = logp_backward(logits, ids - columns.first, temperature, support, active, lse, seed, columns.real)
    return result
