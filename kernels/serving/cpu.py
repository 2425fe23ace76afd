"""CPU backend of serving, and its definition: the operators one after the other."""

from __future__ import annotations

import torch

from rlk.kernels.qk_norm import qk_norm
from rlk.kernels.rms_norm import rms_norm
from rlk.kernels.rope import rope


def store_kv(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    page, dim = kv_cache.shape[2], key.shape[2]
    rows = ((slots >= 0) & (slots < kv_cache.shape[0] * page)).nonzero()[:, 0]
    block, offset = slots[rows] // page, slots[rows] % page
    kv_cache[block, :, offset, :dim] = key[rows]
    kv_cache[block, :, offset, dim:] = value[rows]


def rotate_into_cache(
    qkv: torch.Tensor, q_gamma: torch.Tensor, k_gamma: torch.Tensor, eps: float, positions: torch.Tensor, table: torch.Tensor,
    kv_cache: torch.Tensor, slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    groups, dim = kv_cache.shape[1], kv_cache.shape[3] // 2
    each = qkv.shape[1] // (groups * dim) - 2
    q, k, v = qkv.view(-1, groups, each + 2, dim).split([each, 1, 1], dim=2)
    store_kv(rope(qk_norm(k.flatten(1, 2), k_gamma, eps), positions, table), v.flatten(1, 2), kv_cache, slots)
    return rope(qk_norm(q.flatten(1, 2), q_gamma, eps), positions, table)


def add_rms_norm(x: torch.Tensor, y: torch.Tensor, gamma: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + y
    return total, rms_norm(total, gamma, eps)
