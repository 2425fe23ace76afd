"""Triton backend of batch_invariant_logp: det_gemm's matrix products and logp's states and slopes over one vocabulary shard at a time.

The logits of a shard of some rows are the only ones in memory. An element of a product does not depend on the tile or the range it is
computed in, and the kernels are those of lm_head and logp: so are the bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rlk.kernels._triton import TritonSource
from rlk.kernels._triton.fold import fold_leaves
from rlk.kernels.batch_invariant_logp import cpu
from rlk.kernels.det_gemm.triton import input_grad, product, weight_grad
from rlk.kernels.logp.triton import Rows

OP = "batch_invariant_logp"
SOURCE = TritonSource(OP)
ROWS = 2048  # rows whose logits of one vocabulary shard are held at once
LOGITS = 1 << 25  # most logits that the weight gradient holds at once


def _pieces(count: int, size: int) -> Iterator[slice]:
    for first in range(0, count, size):
        yield slice(first, min(first + size, count))


def _at(
    op: str, rows: slice, limit: int, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None,
    active: torch.Tensor | None,
) -> Rows:  # fmt: skip
    support, active = (None if x is None else x[rows] for x in (support, active))
    return Rows(op, ids[rows], temperature[rows], support, active, limit)


def _shards(limit: int, padded_vocab: int, shards: int) -> list[range]:
    """Real columns of each vocabulary shard; empty for a shard of padding."""
    width = padded_vocab // shards
    return [range(min(s * width, limit), min((s + 1) * width, limit)) for s in range(shards)]


batch_invariant_logp = cpu.batch_invariant_logp


@batch_invariant_logp.register_kernel("cuda")
def run_forward(
    h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None,
    active: torch.Tensor | None, vocab_size: int, padded_vocab: int, shards: int, vocab_tile: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    out, lse = h.new_empty(len(h), dtype=torch.float32), h.new_empty(len(h), dtype=torch.float32)
    limit = min(vocab_size, len(w))
    for piece in _pieces(len(h), ROWS):
        rows = _at(OP, piece, limit, ids, temperature, support, active)
        rows.start(padded_vocab, shards, vocab_tile)
        for s, shard in enumerate(_shards(limit, padded_vocab, shards)):
            logits = product(OP, h[piece], w[shard.start : shard.stop], 1, torch.float32) if shard else temperature.new_empty(0, 1)
            rows.add(logits, shard.start, s, 1)
        out[piece], lse[piece] = rows.score()
    return out, lse


@cpu.batch_invariant_logp_input_grad.register_kernel("cuda")
def run_input_grad(
    h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None,
    active: torch.Tensor | None, lse: torch.Tensor, seed: torch.Tensor, vocab_size: int, padded_vocab: int, shards: int,
) -> torch.Tensor:  # fmt: skip
    op, limit, dh = f"{OP}.input_grad", min(vocab_size, len(w)), h.new_empty(h.shape)
    for piece in _pieces(len(h), ROWS):
        rows = _at(op, piece, limit, ids, temperature, support, active)
        parts = torch.zeros((shards, len(rows.ids), h.shape[1]), dtype=torch.float32, device=h.device)
        for s, shard in enumerate(_shards(limit, padded_vocab, shards)):
            if shard:
                columns = w[shard.start : shard.stop]
                logits = product(op, h[piece], columns, 1, torch.float32)
                dlogits = rows.slopes(logits, shard.start, lse[piece], seed[piece], torch.bfloat16)
                parts[s] = input_grad(op, dlogits, columns, 1, torch.float32)
        fold_leaves(SOURCE, parts, dh[piece])
    return dh


def batch_invariant_logp_weight_grad(
    h: torch.Tensor, w: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, support: torch.Tensor | None,
    active: torch.Tensor | None, lse: torch.Tensor, seed: torch.Tensor, index: torch.Tensor, offsets: torch.Tensor,
    vocab_size: int, vocab_tile: int, wanted: range,
) -> torch.Tensor:  # fmt: skip
    op = f"{OP}.weight_grad"
    rows = _at(op, slice(None), vocab_size, ids, temperature, support, active)
    dw = torch.zeros((len(wanted), h.shape[1]), dtype=torch.float32, device=h.device)
    step = max(vocab_tile, LOGITS // max(len(h), 1) // vocab_tile * vocab_tile)
    for piece in _pieces(min(wanted.stop, vocab_size) - wanted.start, step):
        first, end = wanted.start + piece.start, wanted.start + piece.stop
        logits = product(op, h, w[first:end], 1, torch.float32)
        dlogits = rows.slopes(logits, first, lse, seed, torch.bfloat16)
        weight_grad(op, h, dlogits, index, offsets, out=dw[piece])
    return dw


def examples() -> None:
    """Calls for the ahead-of-time harness: Qwen3-8B's head; its kernels are det_gemm's and logp's, and the join of shards."""
    with torch.device("meta"):
        h, w = torch.empty(512, 4096, dtype=torch.bfloat16), torch.empty(19072, 4096, dtype=torch.bfloat16)
        ids, values = torch.empty(512, dtype=torch.int64), torch.empty(512)
        run_forward(h, w, ids, values, None, None, 19072, 19072, 1, 1024)
        run_input_grad(h, w, ids, values, None, None, values, values, 19072, 19072, 1)
