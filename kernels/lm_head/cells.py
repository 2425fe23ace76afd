"""Arguments of lm_head at the dimensions of the contract."""

from __future__ import annotations

import torch

from rlk.contract.numerics import DEFAULT
from rlk.contract.operators import OperatorShape
from rlk.kernels.case import Draw, Launch, Leaves, OperatorCase, Tensors, differentiate, exact, leaf
from rlk.kernels.det_gemm import det_gemm, det_gemm_weight_grad
from rlk.kernels.det_gemm.reference import det_gemm_weight_grad as reference_weight_grad
from rlk.kernels.lm_head import lm_head, lm_head_weight_grad, reference

SPLITS = DEFAULT.canonical_tp


def build(shape: OperatorShape, backend: str) -> OperatorCase:
    """sizes: k, n; weight_rows: rows of the weight whose gradient is computed. The seed is fp32 and holds bf16 values."""
    draw, k, n, wanted = Draw(shape, backend), shape.sizes["k"], shape.sizes["n"], shape.sizes["weight_rows"]
    weight = draw.weight(n, k)
    rows = {"hidden": draw.normal(draw.tokens, k), "dy": draw.seed(draw.tokens, n)}

    def forward(launch: Launch) -> Tensors:
        return {"logits": lm_head(launch["hidden"], weight, grad_splits=SPLITS, backend=backend)}

    def gradients(launch: Launch) -> Tensors:
        hidden = leaf(launch["hidden"])
        logits = lm_head(hidden, weight, grad_splits=SPLITS, backend=backend)
        return {"hidden": differentiate(logits, launch["dy"].float(), hidden)[0]}

    def weight_gradients(launch: Launch, leaves: Leaves) -> Tensors:
        return {"weight": lm_head_weight_grad(launch["hidden"], launch["dy"][:, :wanted], *leaves, backend=backend)}

    def composed(launch: Launch) -> tuple[Tensors, Tensors]:
        hidden = leaf(launch["hidden"])
        logits = det_gemm(hidden, weight, grad_splits=SPLITS, out_dtype=torch.float32, backend=backend)
        (dhidden,) = differentiate(logits, launch["dy"].float(), hidden)
        leaves = case.leaves(launch.placement, launch.placement.samples)
        dweight = det_gemm_weight_grad(launch["hidden"], launch["dy"][:, :wanted], *leaves, backend=backend)
        return {"logits": logits.detach()}, {"hidden": dhidden, "weight": dweight}

    def specified(gradient: bool) -> Tensors:
        hidden, dy = exact(rows["hidden"]), rows["dy"].float()
        logits = reference.lm_head(hidden, weight)
        if not gradient:
            return {"logits": logits}
        return {"hidden": differentiate(logits, dy, hidden)[0], "weight": reference_weight_grad(rows["hidden"], dy[:, :wanted])}

    case = OperatorCase(shape, rows, forward, gradients, specified, weight_gradients, composed=composed)
    return case
