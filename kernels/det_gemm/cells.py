"""Arguments of det_gemm at the dimensions of the contract."""

from __future__ import annotations

from rlk.contract.operators import OperatorShape
from rlk.kernels.case import Draw, Launch, Leaves, OperatorCase, Tensors, differentiate, exact, leaf
from rlk.kernels.det_gemm import det_gemm, det_gemm_weight_grad, reference


def build(shape: OperatorShape, backend: str) -> OperatorCase:
    """sizes: k, n, splits, grad_splits; weight_rows: rows of the weight whose gradient is computed."""
    draw, k, n, wanted = Draw(shape, backend), shape.sizes["k"], shape.sizes["n"], shape.sizes["weight_rows"]
    splits, grad_splits = shape.sizes["splits"], shape.sizes["grad_splits"]
    weight = draw.weight(n, k)
    rows = {"x": draw.normal(draw.tokens, k), "dy": draw.seed(draw.tokens, n)}

    def forward(launch: Launch) -> Tensors:
        return {"y": det_gemm(launch["x"], weight, splits=splits, grad_splits=grad_splits, backend=backend)}

    def gradients(launch: Launch) -> Tensors:
        x = leaf(launch["x"])
        y = det_gemm(x, weight, splits=splits, grad_splits=grad_splits, backend=backend)
        return {"x": differentiate(y, launch["dy"], x)[0]}

    def weight_gradients(launch: Launch, leaves: Leaves) -> Tensors:
        return {"weight": det_gemm_weight_grad(launch["x"], launch["dy"][:, :wanted], *leaves, backend=backend)}

    def specified(gradient: bool) -> Tensors:
        x, dy = exact(rows["x"]), rows["dy"].float()
        y = reference.det_gemm(x, weight)
        if not gradient:
            return {"y": y}
        return {"x": differentiate(y, dy, x)[0], "weight": reference.det_gemm_weight_grad(rows["x"], dy[:, :wanted])}

    return OperatorCase(shape, rows, forward, gradients, specified, weight_gradients)
