"""sampling: one token per row of fp32 logits, and the ids that top-k and top-p retain. Every sum is a sum of integers, so no order of
addition, no neighbour, no tile and no platform can change a token or a support.

The rule for a row z over the real vocabulary, fp32 steps IEEE and without FMA:

1. t = z/T; m = max t. Greedy takes m's lowest id and retains every id; what follows is for the other rows.
2. w = ⌊2^44·exp(t − m)⌋, an integer: y = (t − m)·log2 e, at least −64; n = ⌊y⌋; p = polynomial :data:`POWER` of y − n (Horner, fp32), close
   to 2^(y−n) and exactly 1 at 0; w = (2^23·p as an integer · 2^21) >> −n.
3. Ids are ordered by t descending, equal t (−0 = +0) by id ascending. top_k keeps the first k of them.
4. top_p keeps their shortest prefix with Σ w >= ⌈top_p·W⌉, W the sum over what top_k left, at least one id; top_p counts as
   ⌊2^64·top_p⌋/2^64.
5. The token: the first id, in ascending order of ids, at which the running Σ w over the retained ids exceeds ⌊u·W/2^64⌋, W their sum and u
   the first 64 bits of Philox4x64-10 with key (seed, 0) and counter (position + 1, 0, 0, 0), as ``numpy.random.Philox`` draws them.

A vocabulary has at most 2^18 ids, so that every sum stays below 2^63.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlk.kernels._triton import from_triton
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.sampling import cpu
from rlk.kernels.sampling.cpu import POWER, WHOLE, fixed_point

__all__ = ["POWER", "WHOLE", "Drawn", "Rows", "fixed_point", "sample"]

_SAMPLE: Backends = {"cpu": cpu.sample, "triton": from_triton("sampling", "sample")}


@dataclass(frozen=True)
class Rows:
    """How each row is sampled, one element per row.

    temperature: [T] fp32, positive. top_p: [T] int64, the bits of :func:`fixed_point`; WHOLE keeps all. top_k: [T] int64, -1 keeps all and
    0 is greedy. seed, position: [T] int64, not negative.
    """

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    seed: torch.Tensor
    position: torch.Tensor


@dataclass(frozen=True)
class Drawn:
    """ids: [T] int64. support: [T, padded_vocab/8] uint8, bit j of byte i is id 8i + j, or None when no row was to be truncated."""

    ids: torch.Tensor
    support: torch.Tensor | None


def sample(
    logits: torch.Tensor,
    rows: Rows,
    failed: torch.Tensor,
    *,
    vocab_size: int,
    padded_vocab: int,
    by_count: bool,
    by_weight: bool,
    backend: str | None = None,
) -> Drawn:
    """Draw one id per row; the rule is the module's. The host never waits for the device.

    logits: [T, width] fp32 with vocab_size <= width; columns from vocab_size on are ignored. by_count, by_weight: whether any row has a
    top_k that cuts, a top_p below WHOLE; with neither there are no supports.
    failed: [3] int64. A row whose t are not all finite draws id 0 and, where failed[0] is 0, sets it to (1, its seed, its position); a row
    with a limit that by_count or by_weight denies likewise, with 2. Supports of both are unspecified.
    Raises ValueError on a wrong shape or dtype, BackendUnavailable for a backend that cannot run here.
    """
    count = len(logits)
    if logits.dtype != torch.float32 or logits.ndim != 2 or not 0 < vocab_size <= min(logits.shape[1], padded_vocab, 1 << 18):
        raise ValueError(f"sampling: logits {tuple(logits.shape)} {logits.dtype} must be float32 [T, {vocab_size} or more]")
    if padded_vocab % 32:
        raise ValueError(f"sampling: padded_vocab={padded_vocab} must be a multiple of 32")
    for name, tensor, dtype, shape in (
        ("temperature", rows.temperature, torch.float32, (count,)),
        ("top_p", rows.top_p, torch.int64, (count,)),
        ("top_k", rows.top_k, torch.int64, (count,)),
        ("seed", rows.seed, torch.int64, (count,)),
        ("position", rows.position, torch.int64, (count,)),
        ("failed", failed, torch.int64, (3,)),
    ):
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise ValueError(f"sampling: {name} {tuple(tensor.shape)} {tensor.dtype} must be contiguous {dtype} {shape}")
    run = select("sampling", _SAMPLE, backend, logits.device)
    ids, support = run(
        logits, rows.temperature, rows.top_p, rows.top_k, rows.seed, rows.position, failed, vocab_size, padded_vocab, by_count, by_weight
    )
    return Drawn(ids, support)
