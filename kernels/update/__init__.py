"""update: the arithmetic of an optimizer step over one tensor, Adam and the squares of the gradient norm.

Both are defined by their composition of elementwise operations (``cpu``): a backend may do them in one pass, and may not change a byte.
"""

from __future__ import annotations

import torch

from rlk.contract.update import AdamStep
from rlk.kernels._triton import from_triton
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.update import cpu

_ADAM: Backends = {"cpu": cpu.adam, "triton": from_triton("update", "adam")}
_SQUARES: Backends = {"cpu": cpu.block_squares, "triton": from_triton("update", "block_squares")}


def adam(
    weight: torch.Tensor, master: torch.Tensor, m: torch.Tensor, v: torch.Tensor, gradient: torch.Tensor, step: AdamStep, *,
    scale: float, decays: bool, backend: str | None = None,
) -> None:  # fmt: skip
    """One step in place: master, m and v by the formula of ``rlk.contract.update.AdamStep``, weight = RNE bf16(master).

    weight: bf16; master, m, v, gradient: fp32; all of one shape and contiguous. scale: fp32 factor of the gradient, 1 for none; decays:
    whether weight decay applies. The gradient stays as it is. Raises ValueError on a wrong shape, dtype or stride.
    """
    for name, tensor in (("weight", weight), ("master", master), ("m", m), ("v", v), ("gradient", gradient)):
        dtype = torch.bfloat16 if name == "weight" else torch.float32
        if tensor.shape != master.shape or tensor.dtype != dtype or not tensor.is_contiguous():
            raise ValueError(f"adam: {name} {tuple(tensor.shape)} {tensor.dtype} must be {dtype} {tuple(master.shape)} and contiguous")
    select("update.adam", _ADAM, backend, master.device)(weight, master, m, v, gradient, step, scale, decays)


def block_squares(shards: torch.Tensor, block: int, *, backend: str | None = None) -> torch.Tensor:
    """Σ x² of every ``block`` elements of each shard, in row-major order: [shards, blocks] fp64 of [shards, …] fp32.

    x² of an fp32 x is exact in fp64; the sum is a row tree, the last block filled with +0. The shards may be views of a larger tensor.
    Raises ValueError unless shards is fp32 [shards, …] with an element and block a power of two.
    """
    if shards.dtype != torch.float32 or shards.dim() < 2 or not shards.numel() or block & (block - 1):
        raise ValueError(
            f"block_squares: shards {tuple(shards.shape)} {shards.dtype} must be fp32 [shards, …], block={block} a power of two"
        )
    if shards.dim() > 3 or shards.stride(-1) != 1:  # a backend reads rows of whole columns
        shards = shards.contiguous()
    result: torch.Tensor = select("update.block_squares", _SQUARES, backend, shards.device)(shards, block)
    return result
