"""Arguments of silu at the dimensions of the contract."""

from __future__ import annotations

from rlk.contract.operators import OperatorShape
from rlk.kernels.case import Draw, Launch, OperatorCase, Tensors, differentiate, exact, leaf
from rlk.kernels.silu import reference, silu


def build(shape: OperatorShape, backend: str) -> OperatorCase:
    """sizes: width."""
    draw, width = Draw(shape, backend), shape.sizes["width"]
    rows = {"x": draw.normal(draw.tokens, width, scale=4), "dy": draw.seed(draw.tokens, width)}

    def forward(launch: Launch) -> Tensors:
        return {"y": silu(launch["x"], backend=backend)}

    def gradients(launch: Launch) -> Tensors:
        x = leaf(launch["x"])
        return {"x": differentiate(silu(x, backend=backend), launch["dy"], x)[0]}

    def specified(gradient: bool) -> Tensors:
        x = exact(rows["x"])
        y = reference.silu(x)
        return {"x": differentiate(y, rows["dy"].float(), x)[0]} if gradient else {"y": y}

    return OperatorCase(shape, rows, forward, gradients, specified)
