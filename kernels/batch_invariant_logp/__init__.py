"""batch_invariant_logp: log-probability of one selected token per row of hidden states; logits are never whole.

Same bytes as :func:`rlk.kernels.lm_head.lm_head` followed by :func:`rlk.kernels.logp.logp`, forward and backward, in a fraction of the
memory: logits exist for one vocabulary tile (forward, weight gradient) or one vocabulary shard of a few rows (input gradient) at a time
and are computed again where the backward pass needs them.

Reduction order: logits in plain order over H; log-sum-exp as in :mod:`rlk.kernels.logp`; the input gradient in split order over the
vocabulary shards, columns of a shard in groups of 16 from its first; the weight gradient in token order. Source: the contract's
"Contractions" 1 to 3 and "Logprob".
"""

from __future__ import annotations

import torch

from rlk.kernels._triton import from_triton
from rlk.kernels.batch_invariant_logp import cpu
from rlk.kernels.det_gemm import check_product
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.leaves import check_leaves
from rlk.kernels.logp import for_device, require_rows, require_vocabulary

OP = "batch_invariant_logp"
_FORWARD: Backends = {"cpu": cpu.batch_invariant_logp, "triton": from_triton("batch_invariant_logp", "batch_invariant_logp")}
_WEIGHT_GRAD: Backends = {
    "cpu": cpu.batch_invariant_logp_weight_grad,
    "triton": from_triton("batch_invariant_logp", "batch_invariant_logp_weight_grad"),
}


def batch_invariant_logp(
    h: torch.Tensor,
    w: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    *,
    vocab_size: int,
    padded_vocab: int,
    shards: int = 8,
    vocab_tile: int = 1024,
    support: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Log-probability [T] fp32 of ``ids`` under softmax(h·wᵀ/temperature) over the support.

    h: [T, H] bf16; w: [V, H] bf16, V <= padded_vocab, rows >= vocab_size are padding and are not read. ids: [T] int64.
    temperature: [T] fp32, positive and finite. support: as in logp, [T, V] bool or bits; None for every real column. active: [T] bool,
    None for all; an inactive row gives logp and gradient +0, whatever it holds.
    Differentiable in h only: dh [T, H] bf16, dlogits rounded to bf16 in between. The gradient of w is
    :func:`batch_invariant_logp_weight_grad`, in fp32, outside autograd.
    Raises ValueError before any launch: wrong shapes or dtypes, sizes that do not fit, a temperature that is not positive and finite,
    a selected id that is padded, out of range or outside its support, a support that holds a padded id. BackendUnavailable: the backend
    cannot run here.
    """
    return batch_invariant_logp_with_lse(
        h, w, ids, temperature, vocab_size=vocab_size, padded_vocab=padded_vocab, shards=shards, vocab_tile=vocab_tile,
        support=support, active=active, backend=backend,
    )[0]  # fmt: skip


def batch_invariant_logp_with_lse(
    h: torch.Tensor,
    w: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    *,
    vocab_size: int,
    padded_vocab: int,
    shards: int = 8,
    vocab_tile: int = 1024,
    support: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`batch_invariant_logp` and the LSE [T] fp32 of the scaled logits (natural log, not differentiable; +0 in inactive rows)."""
    check_product(OP, h, w, 1, 1)
    require_vocabulary(OP, w.shape[0], vocab_size, padded_vocab, shards, vocab_tile)
    require_rows(OP, h.shape[0], w.shape[0], vocab_size, ids, temperature, support, active)
    run = select(OP, _FORWARD, backend, h.device)
    score, lse = run(h, w, ids, temperature, for_device(support, w.shape[0]), active, vocab_size, padded_vocab, shards, vocab_tile)
    return score, lse


def batch_invariant_logp_weight_grad(
    h: torch.Tensor,
    w: torch.Tensor,
    ids: torch.Tensor,
    temperature: torch.Tensor,
    lse: torch.Tensor,
    seed: torch.Tensor,
    leaf_index: torch.Tensor,
    leaf_offsets: torch.Tensor,
    *,
    vocab_size: int,
    vocab_tile: int = 1024,
    support: torch.Tensor | None = None,
    active: torch.Tensor | None = None,
    wanted: range | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Gradient of w: Σ over tokens of dlogits[t, v]·h[t, i], fp32, token order; +0 in padded rows.

    h … temperature, support, active: as given to the forward pass. lse: [T] fp32, what the forward pass returned. seed: [T] fp32, the
    gradient of its logp. leaf_index: [n] int64 token rows (-1 = +0 fill), leaf_offsets: [leaves+1] int64, both from
    ``rlk.contract.topology.token_leaves``. wanted: consecutive rows of w whose gradient is asked for (None: all), as a vocabulary shard
    has them; returns [len(wanted), H]. ``vocab_tile`` bounds memory only: rows of w do not depend on each other.
    Raises ValueError on a wrong shape, dtype, id, range, or leaves that do not fit the tokens.
    """
    op = f"{OP}_weight_grad"
    require_vocabulary(op, w.shape[0], vocab_size, max(vocab_size, w.shape[0]), 1, vocab_tile)
    check_product(op, h, w, 1, 1)
    require_rows(op, h.shape[0], w.shape[0], vocab_size, ids, temperature, support, active)
    for name, tensor in (("lse", lse), ("seed", seed)):
        if tensor.shape != h.shape[:1] or tensor.dtype != torch.float32:
            raise ValueError(f"{op}: {name} {tuple(tensor.shape)} {tensor.dtype} must be [{h.shape[0]}] float32")
    rows = range(w.shape[0]) if wanted is None else wanted
    if rows.step != 1 or not 0 <= rows.start <= rows.stop <= w.shape[0]:
        raise ValueError(f"{op}: wanted {rows} must be consecutive rows of the {w.shape[0]} of w")
    check_leaves(op, leaf_index, leaf_offsets, h)
    support = for_device(support, w.shape[0])
    run = select(f"{OP}.weight_grad", _WEIGHT_GRAD, backend, h.device)
    dw: torch.Tensor = run(
        h, w, ids, temperature, support, active, lse, seed, leaf_index, leaf_offsets, vocab_size, vocab_tile, rows
    )  # fmt: skip
    return dw
