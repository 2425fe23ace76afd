"""update: the arithmetic of an optimizer step over all tensors of a rank, Adam and the squares of the gradient norm.

Both are defined by their composition of elementwise operations (``cpu``): a backend may take all tensors in one pass, and may not change a
byte. Both are prepared once for tensors that stay where they are, and then called as often as wanted, so that a host that starts them does
little more than launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rlk.contract.update import AdamStep
from rlk.kernels._triton import from_triton
from rlk.kernels.dispatch import Backends, select
from rlk.kernels.update import cpu
from rlk.kernels.update.cpu import AdamTensors

__all__ = ["AdamTensors", "adam", "square_sums"]

_ADAM: Backends = {"cpu": cpu.adam, "triton": from_triton("update", "adam")}
_SQUARES: Backends = {"cpu": cpu.square_sums, "triton": from_triton("update", "square_sums")}
_DTYPES = (torch.bfloat16, *[torch.float32] * 4)


def adam(parameters: Sequence[AdamTensors], decays: Sequence[bool], *, backend: str | None = None) -> Callable[[AdamStep, float], None]:
    """A function of a step and a scale that updates all parameters in place.

    Master, m and v by the formula of ``rlk.contract.update.AdamStep``, weight = RNE bf16(master). At least one parameter; tensors are
    contiguous, on one device, and keep their memory. decays: whether weight decay applies, of each parameter. scale: fp32 factor of every
    gradient, 1 for none. Gradients stay as they are. Raises ValueError on a wrong shape, dtype, stride or device.
    """
    device = parameters[0].master.device
    for at, held in enumerate(parameters):
        for name, tensor, dtype in zip(AdamTensors._fields, held, _DTYPES):
            if tensor.shape != held.master.shape or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
                raise ValueError(
                    f"adam: {name} of parameter {at}, {tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, must be {dtype} "
                    f"{tuple(held.master.shape)} on {device} and contiguous"
                )
    made: Callable[[AdamStep, float], None] = select("update.adam", _ADAM, backend, device)(parameters, decays)
    return made


def square_sums(tensors: Sequence[torch.Tensor], block: int, *, backend: str | None = None) -> Callable[[], torch.Tensor]:
    """A function that gives Σ x² of each shard of each tensor [shards, …]: fp64 [shards of all tensors], in order.

    x² of an fp32 x is exact in fp64. Order: a row tree over every ``block`` elements of the shard in row-major order, the last block filled
    with +0, then a row tree over the block sums. The shards may be views of a larger tensor; all keep their memory. Raises ValueError
    unless every tensor is fp32 [shards, …] with an element and adjacent elements in its rows, all on one device, and block a power of two.
    """
    for shards in tensors:
        right = shards.dtype == torch.float32 and shards.dim() in (2, 3) and shards.numel() and shards.device == tensors[0].device
        if not right or shards.stride(-1) != 1:
            raise ValueError(
                f"square_sums: {tuple(shards.shape)} {shards.dtype} on {shards.device}, strides {shards.stride()}, must be fp32 "
                "[shards, …], two or three dimensions whose last one is adjacent, on one device"
            )
    if not tensors or block < 1 or block & (block - 1):
        raise ValueError(f"square_sums: {len(tensors)} tensors in blocks of {block}: hand over one tensor or more, and a power of two")
    made: Callable[[], torch.Tensor] = select("update.square_sums", _SQUARES, backend, tensors[0].device)(tensors, block)
    return made
