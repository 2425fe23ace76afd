"""Arguments of rms_norm at the dimensions of the contract."""

from __future__ import annotations

from rlk.contract.models import QWEN3_8B
from rlk.contract.operators import OperatorShape
from rlk.kernels.case import Draw, Launch, Leaves, OperatorCase, Tensors, differentiate, exact, leaf
from rlk.kernels.rms_norm import reference, rms_norm, rms_norm_gamma_grad

EPS = QWEN3_8B.rms_norm_eps


def build(shape: OperatorShape, backend: str) -> OperatorCase:
    """sizes: width."""
    draw, width = Draw(shape, backend), shape.sizes["width"]
    gamma = draw.normal(width)
    rows = {"x": draw.normal(draw.tokens, width), "dy": draw.seed(draw.tokens, width)}

    def forward(launch: Launch) -> Tensors:
        return {"y": rms_norm(launch["x"], gamma, EPS, backend=backend)}

    def gradients(launch: Launch) -> Tensors:
        x = leaf(launch["x"])
        return {"x": differentiate(rms_norm(x, gamma, EPS, backend=backend), launch["dy"], x)[0]}

    def weight_gradients(launch: Launch, leaves: Leaves) -> Tensors:
        return {"gamma": rms_norm_gamma_grad(launch["x"], launch["dy"], EPS, *leaves, backend=backend)}

    def specified(gradient: bool) -> Tensors:
        x, g = exact(rows["x"]), exact(gamma)
        y = reference.rms_norm(x, g, EPS)
        return dict(zip(("x", "gamma"), differentiate(y, rows["dy"].float(), x, g))) if gradient else {"y": y}

    return OperatorCase(shape, rows, forward, gradients, specified, weight_gradients)
