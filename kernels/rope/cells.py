"""Arguments of rope at the dimensions of the contract."""

from __future__ import annotations

import torch

from rlk.contract.models import QWEN3_8B
from rlk.contract.operators import OperatorShape
from rlk.kernels.case import Draw, Launch, OperatorCase, Tensors, differentiate, exact, leaf
from rlk.kernels.rope import reference, rope, rope_table

THETA = QWEN3_8B.rope_theta


def build(shape: OperatorShape, backend: str) -> OperatorCase:
    """sizes: heads, dim, positions. A token's position is its place in its sample."""
    draw, heads, dim = Draw(shape, backend), shape.sizes["heads"], shape.sizes["dim"]
    x = draw.normal(draw.tokens, heads, dim)
    table = rope_table(dim, THETA, shape.sizes["positions"]).to(x.device)
    positions = torch.cat([torch.arange(n) for n in shape.batch.lengths]).to(x.device)
    rows = {"x": x, "positions": positions, "dy": draw.seed(draw.tokens, heads, dim)}

    def forward(launch: Launch) -> Tensors:
        return {"y": rope(launch["x"], launch["positions"], table, backend=backend)}

    def gradients(launch: Launch) -> Tensors:
        x = leaf(launch["x"])
        return {"x": differentiate(rope(x, launch["positions"], table, backend=backend), launch["dy"], x)[0]}

    def specified(gradient: bool) -> Tensors:
        x = exact(rows["x"])
        y = reference.rope(x, positions, THETA).float()
        return {"x": differentiate(y, rows["dy"].float(), x)[0]} if gradient else {"y": y}

    return OperatorCase(shape, rows, forward, gradients, specified)
