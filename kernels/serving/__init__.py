"""serving: fused steps of a decoder layer over a paged KV cache; the bytes are those of the operators they are made of.

An engine that generates token by token pays for every launch, so what stands between two matrix products is one launch here. Each function
is defined by its composition (``cpu``): a backend may fuse it, and may not change a byte. None of them has a gradient.
"""

from __future__ import annotations

import torch

from rlk.kernels._triton import from_triton
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.serving import cpu

_STORE: Backends = {"cpu": cpu.store_kv, "triton": from_triton("serving", "store_kv")}
_ROTATE: Backends = {"cpu": cpu.rotate_into_cache, "triton": from_triton("serving", "rotate_into_cache")}
_ADD_NORM: Backends = {"cpu": cpu.add_rms_norm, "triton": from_triton("serving", "add_rms_norm")}


def store_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor, *, backend: str | None = None) -> None:
    """Copy keys and values into their slots of a paged cache; nothing else in it is written.

    key, value: [T, Hk, D] bf16; kv_cache: [blocks, Hk, page, 2·D] bf16, K then V, last dimension contiguous, the others of any stride.
    slots: [T] int64, block·page + offset of each row; a row of a slot outside the cache, as −1, is not written.
    Raises ValueError on a wrong shape or dtype, BackendUnavailable for a backend that cannot run here.
    """
    _require_cache("store_kv", kv_cache, key.shape[1], key.shape[2])
    if key.shape != value.shape or slots.shape != key.shape[:1] or slots.dtype != torch.int64 or key.dtype != torch.bfloat16:
        raise ValueError(f"store_kv: key {tuple(key.shape)}, value {tuple(value.shape)}, slots {tuple(slots.shape)} {slots.dtype}")
    select("serving.store_kv", _STORE, backend, key.device)(key, value, kv_cache, slots)


def rotate_into_cache(
    qkv: torch.Tensor, q_gamma: torch.Tensor, k_gamma: torch.Tensor, eps: float, positions: torch.Tensor, table: torch.Tensor,
    kv_cache: torch.Tensor, slots: torch.Tensor, *, backend: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """q = rope(qk_norm(queries)), [T, Hq, D] bf16; rope(qk_norm(keys)) and the values go into the cache as in :func:`store_kv`.

    qkv: [T, Hk·(g+2)·D] bf16, per KV group [g query heads | key | value]; q_gamma, k_gamma: [D] bf16; positions: [T] int64; table as in
    ``rlk.kernels.rope``; kv_cache and slots as in :func:`store_kv`. Rounded where ``qk_norm`` and ``rope`` round.
    Raises ValueError on a wrong shape or dtype or a head dimension that is no power of two. On a card no position is read by the host:
    rows of one outside the table are NaN there.
    """
    dim, groups = 2 * table.shape[2], kv_cache.shape[1]
    _require_cache("rotate_into_cache", kv_cache, groups, dim)
    tokens, width = qkv.shape
    if qkv.dtype != torch.bfloat16 or width % (groups * dim) or width // (groups * dim) < 3 or dim & (dim - 1):
        raise ValueError(f"rotate_into_cache: qkv {tuple(qkv.shape)} {qkv.dtype} must be bf16 [T, {groups}·(g+2)·{dim}], a power of two")
    if positions.shape != (tokens,) or slots.shape != (tokens,) or positions.dtype != torch.int64 or slots.dtype != torch.int64:
        raise ValueError(f"rotate_into_cache: positions {tuple(positions.shape)} and slots {tuple(slots.shape)} must be int64 [{tokens}]")
    run = select("serving.rotate_into_cache", _ROTATE, backend, qkv.device)
    result: torch.Tensor = run(qkv, q_gamma, k_gamma, eps, positions, table, kv_cache, slots)
    return result


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, gamma: torch.Tensor, eps: float, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(bf16(x + y), rms_norm of it): the norm reads the rounded residual.

    x, y: [T, width] bf16; gamma: [width] bf16; both results [T, width] bf16. Raises ValueError on a wrong shape or dtype.
    """
    if x.dtype != torch.bfloat16 or x.shape != y.shape or y.dtype != x.dtype or gamma.shape != x.shape[-1:] or x.ndim != 2:
        raise ValueError(f"add_rms_norm: x {tuple(x.shape)} {x.dtype}, y {tuple(y.shape)} {y.dtype}, gamma {tuple(gamma.shape)}")
    total, normed = select("serving.add_rms_norm", _ADD_NORM, backend, x.device)(x, y, gamma, eps)
    return total, normed


def _require_cache(op: str, kv_cache: torch.Tensor, heads: int, dim: int) -> None:
    shape = kv_cache.shape
    if kv_cache.dtype != torch.bfloat16 or kv_cache.ndim != 4 or shape[1] != heads or shape[3] != 2 * dim or kv_cache.stride(3) != 1:
        raise ValueError(f"{op}: kv_cache {tuple(shape)} {kv_cache.dtype} must be bf16 [blocks, {heads}, page, {2 * dim}]")
