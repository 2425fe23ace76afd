"""Arguments of pack and unpack at the dimensions of the contract."""

from __future__ import annotations

import torch

from rlk.contract.operators import OperatorShape
from rlk.kernels.case import Draw, Launch, OperatorCase, Tensors, differentiate, leaf
from rlk.kernels.pack import pack, reference, unpack


def build(shape: OperatorShape, backend: str) -> OperatorCase:
    """sizes: width. A launch of whole padded samples is a batch [samples, pad_to], any other one a batch of one line."""
    draw, width = Draw(shape, backend), shape.sizes["width"]
    rows = {name: draw.normal(draw.tokens, width) for name in ("padded", "rows", "d_packed", "d_unpacked")}

    def mask_of(launch: Launch) -> torch.Tensor:
        whole = not launch.placement.neighbours and launch.placement.rows == len(shape.batch.lengths) * shape.batch.pad_to
        return launch.live.reshape(-1, shape.batch.pad_to) if whole else launch.live[None]

    def aligned(launch: Launch, packed: torch.Tensor) -> torch.Tensor:
        """One row per row of the launch, NaN where nothing was packed."""
        out = packed.new_full((launch.placement.rows, width), torch.nan)
        out[launch.live] = packed
        return out

    def forward(launch: Launch) -> Tensors:
        mask = mask_of(launch)
        packed = pack(launch["padded"].reshape(*mask.shape, width), mask, backend=backend)
        unpacked = unpack(launch["rows"][launch.live], mask, backend=backend)
        return {"packed": aligned(launch, packed), "unpacked": unpacked.reshape(-1, width)}

    def gradients(launch: Launch) -> Tensors:
        mask = mask_of(launch)
        padded, packed = leaf(launch["padded"].reshape(*mask.shape, width)), leaf(launch["rows"][launch.live])
        (dpadded,) = differentiate(pack(padded, mask, backend=backend), launch["d_packed"][launch.live], padded)
        seed = launch["d_unpacked"].reshape(*mask.shape, width)
        (drows,) = differentiate(unpack(packed, mask, backend=backend), seed, packed)
        return {"padded": dpadded.reshape(-1, width), "rows": aligned(launch, drows)}

    def specified(gradient: bool) -> Tensors:
        """Packing is a copy, so that each of the two is the gradient of the other."""
        mask = torch.ones(1, draw.tokens, dtype=torch.bool)
        to_pack, to_unpack = (rows[name].float() for name in (("d_unpacked", "d_packed") if gradient else ("padded", "rows")))
        packed, unpacked = reference.pack(to_pack[None], mask), reference.unpack(to_unpack, mask, 0)[0]
        return {"padded": unpacked, "rows": packed} if gradient else {"packed": packed, "unpacked": unpacked}

    return OperatorCase(shape, rows, forward, gradients, specified)
