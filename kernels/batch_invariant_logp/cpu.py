"""CPU backend of batch_invariant_logp as ``torch.library`` operators.

The logits of a tile come from det_gemm's library, what becomes of them from batch_invariant_logp.cpp. Tiles are the ones of logp, and an
element of a matrix product does not depend on the tile it is computed in: the bytes are those of lm_head and logp.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from rlk.kernels._native import NativeLibrary
from rlk.kernels.det_gemm.cpu import input_grad, product, weight_grad

LIBRARY = NativeLibrary("batch_invariant_logp", Path(__file__).with_name("batch_invariant_logp.cpp"))
FORWARD_ROWS = 1024  # rows whose logits of one vocabulary tile are held at once
BACKWARD_ROWS = 128  # rows whose logits of one vocabulary shard are held at once


class RowArguments(NamedTuple):
    """What belongs to each row of the hidden states."""

    h: torch.Tensor
    ids: torch.Tensor
    temperature: torch.Tensor
    support: torch.Tensor | None
    active: torch.Tensor | None

    def at(self, rows: slice) -> RowArguments:
        """These rows, contiguous."""
        return RowArguments(*(None if x is None else x[rows].contiguous() for x in self))  # type: ignore[arg-type]

    def pieces(self, size: int) -> Iterator[tuple[slice, RowArguments]]:
        """At most ``size`` rows at a time."""
        for first in range(0, self.h.shape[0], size):
            rows = slice(first, first + size)
            yield rows, self.at(rows)


def _shards(real: int, padded_vocab: int, shards: int) -> list[range]:
    """Columns of each vocabulary shard that are real; empty for a shard of padding."""
    width = padded_vocab // shards
    return [range(min(s * width, real), min((s + 1) * width, real)) for s in range(shards)]


def _slopes(op: str, rows: RowArguments, w: torch.Tensor, columns: range, lse: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """dlogits [rows, columns] bf16."""
    tile = product(op, rows.h, w[columns.start : columns.stop], 1, torch.float32)
    dlogits = torch.empty(tile.shape, dtype=torch.bfloat16)
    LIBRARY.call(
        "slopes", tile, rows.ids, rows.temperature, rows.support, rows.active, lse.contiguous(), seed.contiguous(), dlogits,
        *tile.shape, columns.start, w.shape[0], op=op,
    )  # fmt: skip
    return dlogits


@torch.library.custom_op("rlk::batch_invariant_logp", mutates_args=(), device_types="cpu")
def batch_invariant_logp(
    h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None,
    active: torch.Tensor | None, vocab_size: int, padded_vocab: int, shards: int, vocab_tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out, lse = h.new_empty(h.shape[0], dtype=torch.float32), h.new_empty(h.shape[0], dtype=torch.float32)
    for at, rows in RowArguments(h, ids, temperature, support, active).pieces(FORWARD_ROWS):
        count = rows.h.shape[0]
        states = torch.tensor([float("-inf"), 0.0]).repeat(count, shards, 1)
        selected = torch.empty(count, dtype=torch.float32)
        for s, shard in enumerate(_shards(min(vocab_size, w.shape[0]), padded_vocab, shards)):
            for first in shard[::vocab_tile]:
                tile = product("batch_invariant_logp", rows.h, w[first : min(first + vocab_tile, shard.stop)], 1, torch.float32)
                LIBRARY.call(
                    "fold_tile", tile, rows.ids, rows.temperature, rows.support, rows.active, states, selected,
                    *tile.shape, first, w.shape[0], s, shards,
                )  # fmt: skip
        LIBRARY.call("finish", states, selected, rows.temperature, rows.active, out[at], lse[at], count, shards)
    return out, lse


@batch_invariant_logp.register_fake
def _(h, w, ids, temperature, support, active, vocab_size, padded_vocab, shards, vocab_tile):  # type: ignore[no-untyped-def]
    return h.new_empty(h.shape[0], dtype=torch.float32), h.new_empty(h.shape[0], dtype=torch.float32)


@torch.library.custom_op("rlk::batch_invariant_logp_input_grad", mutates_args=(), device_types="cpu")
def batch_invariant_logp_input_grad(
    h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None,
    active: torch.Tensor | None, lse: torch.Tensor, seed: torch.Tensor, vocab_size: int, padded_vocab: int, shards: int,
) -> torch.Tensor:  # fmt: skip
    op = "batch_invariant_logp.input_grad"
    dh = torch.empty(h.shape, dtype=torch.bfloat16)
    for at, rows in RowArguments(h, ids, temperature, support, active).pieces(BACKWARD_ROWS):
        parts = torch.empty(shards, *rows.h.shape, dtype=torch.float32)
        for s, shard in enumerate(_shards(min(vocab_size, w.shape[0]), padded_vocab, shards)):
            dlogits = _slopes(op, rows, w, shard, lse[at], seed[at])
            parts[s] = input_grad(op, dlogits, w[shard.start : shard.stop], 1, torch.float32)
        LIBRARY.call("join_shards", parts, dh[at], shards, rows.h.numel(), op=op)
    return dh


@batch_invariant_logp_input_grad.register_fake
def _(h, w, ids, temperature, support, active, lse, seed, vocab_size, padded_vocab, shards):  # type: ignore[no-untyped-def]
    return h.new_empty(h.shape, dtype=torch.bfloat16)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    h, w, ids, temperature, support, active, ctx.vocab_size, ctx.padded_vocab, ctx.shards, _ = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(h, w, ids, temperature, support, active, lse)


def _backward(ctx, seed, _lse_grad):  # type: ignore[no-untyped-def]
    sizes = ctx.vocab_size, ctx.padded_vocab, ctx.shards
    return torch.ops.rlk.batch_invariant_logp_input_grad(*ctx.saved_tensors, seed, *sizes), *[None] * 9


batch_invariant_logp.register_autograd(_backward, setup_context=_setup)


def batch_invariant_logp_weight_grad(
    h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None,
    active: torch.Tensor | None, lse: torch.Tensor, seed: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor,
    vocab_size: int, vocab_tile: int, wanted: range,
) -> torch.Tensor:  # fmt: skip
    op = "batch_invariant_logp.weight_grad"
    rows = RowArguments(h, ids, temperature, support, active).at(slice(None))
    dw = torch.zeros(len(wanted), h.shape[1], dtype=torch.float32)
    real = range(wanted.start, max(wanted.start, min(wanted.stop, vocab_size)))
    for first in real[::vocab_tile]:
        columns = range(first, min(first + vocab_tile, real.stop))
        dlogits = _slopes(op, rows, w, columns, lse, seed)
        dw[first - wanted.start : columns.stop - wanted.start] = weight_grad(op, rows.h, dlogits, index, offsets)
    return dw
