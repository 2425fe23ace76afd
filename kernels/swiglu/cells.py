"""Arguments of swiglu at the dimensions of the contract."""

from __future__ import annotations

from rlk.contract.operators import OperatorShape
from rlk.kernels.case import Draw, Launch, OperatorCase, Tensors, differentiate, exact, leaf
from rlk.kernels.swiglu import reference, swiglu


def build(shape: OperatorShape, backend: str) -> OperatorCase:
    """sizes: width (of gate and of up), shards."""
    draw, width, shards = Draw(shape, backend), shape.sizes["width"], shape.sizes["shards"]
    rows = {"gate_up": draw.normal(draw.tokens, 2 * width, scale=2), "dy": draw.seed(draw.tokens, width)}

    def forward(launch: Launch) -> Tensors:
        return {"y": swiglu(launch["gate_up"], shards, backend=backend)}

    def gradients(launch: Launch) -> Tensors:
        gate_up = leaf(launch["gate_up"])
        return {"gate_up": differentiate(swiglu(gate_up, shards, backend=backend), launch["dy"], gate_up)[0]}

    def specified(gradient: bool) -> Tensors:
        gate_up = exact(rows["gate_up"])
        y = reference.swiglu(gate_up, shards)
        return {"gate_up": differentiate(y, rows["dy"].float(), gate_up)[0]} if gradient else {"y": y}

    return OperatorCase(shape, rows, forward, gradients, specified)
