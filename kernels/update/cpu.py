"""CPU backend of update, and its definition: elementwise operations, each of which rounds once.

Factors and summands are Python numbers that fp32 holds exactly; divisors are fp32 tensors, because torch on CUDA turns a division by a
number into a product. On the CPU the square root is numpy's: torch's, from MKL, is off by one unit in a fifth of all fp32 values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rlk.contract.update import AdamStep

_AT_ONCE = 1 << 24
"""Elements of which more than the result is held at a time, unless one shard has more; no byte depends on it."""


class AdamTensors(NamedTuple):
    """One parameter, its state and its gradient, of one shape. weight: bf16, the others fp32."""

    weight: torch.Tensor
    master: torch.Tensor
    m: torch.Tensor
    v: torch.Tensor
    gradient: torch.Tensor


def adam(parameters: Sequence[AdamTensors], decays: Sequence[bool]) -> Callable[[AdamStep, float], None]:
    def update(step: AdamStep, scale: float) -> None:
        for tensors, decay in zip(parameters, decays, strict=True):
            for weight, master, m, v, gradient in zip(*(tensor.view(-1).split(_AT_ONCE) for tensor in tensors)):
                _adam(weight, master, m, v, gradient, decay, step, scale)

    return update


def _adam(
    weight: torch.Tensor, master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, decays: bool, step: AdamStep,
    scale: float,
) -> None:  # fmt: skip
    correction1, correction2 = (torch.tensor(c, dtype=torch.float32, device=m.device) for c in (step.correction1, step.correction2))
    g = gradient * scale if scale != 1 else gradient
    m.mul_(step.beta1).add_(step.one_minus_beta1 * g)
    v.mul_(step.beta2).add_((step.one_minus_beta2 * g).mul_(g))
    change = (m / correction1).div_(_root(v / correction2).add_(step.eps))
    if decays:
        change.add_(step.weight_decay * master)
    master.sub_(change.mul_(step.lr))
    weight.copy_(master)


def _root(x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        return x.sqrt_()
    held = x.numpy()
    np.sqrt(held, out=held)
    return x


def square_sums(tensors: Sequence[torch.Tensor], block: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.cat([row_tree(_block_squares(shards, block)) for shards in tensors])


def _block_squares(shards: torch.Tensor, block: int) -> torch.Tensor:
    """[shards, blocks]"""
    size = shards[0].numel()
    blocks = -(-size // block)
    sums = []
    for held in shards.split(max(1, _AT_ONCE // size)):
        flat = torch.nn.functional.pad(held.reshape(len(held), -1).double(), (0, blocks * block - size))
        rows = flat.view(len(held), blocks, block)
        sums.append(row_tree(rows * rows))
    return torch.cat(sums)


def row_tree(rows: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension, [..., n]: filled with +0 to a power of two, upper half added to the lower until one is left."""
    count = rows.shape[-1]
    width = 1 << (count - 1).bit_length()
    if width != count:
        rows = torch.cat([rows, rows.new_zeros(*rows.shape[:-1], width - count)], dim=-1)
    while width > 1:
        width //= 2
        rows = rows[..., :width] + rows[..., width:]
    return rows[..., 0]
