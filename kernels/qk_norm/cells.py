"""Arguments of qk_norm at the dimensions of the contract."""

from __future__ import annotations

import torch

from rlk.contract.models import QWEN3_8B
from rlk.contract.numerics import DEFAULT
from rlk.contract.operators import OperatorShape
from rlk.contract.orders import fold_pairs
from rlk.kernels.case import Draw, Launch, Leaves, OperatorCase, Tensors, differentiate, exact, leaf
from rlk.kernels.qk_norm import qk_norm, qk_norm_shard_gamma_grads, reference

EPS = QWEN3_8B.rms_norm_eps


def build(shape: OperatorShape, backend: str) -> OperatorCase:
    """sizes: heads, dim."""
    draw, heads, dim = Draw(shape, backend), shape.sizes["heads"], shape.sizes["dim"]
    gamma = draw.normal(dim)
    rows = {"x": draw.normal(draw.tokens, heads, dim), "dy": draw.seed(draw.tokens, heads, dim)}

    def forward(launch: Launch) -> Tensors:
        return {"y": qk_norm(launch["x"], gamma, EPS, backend=backend)}

    def gradients(launch: Launch) -> Tensors:
        x = leaf(launch["x"])
        return {"x": differentiate(qk_norm(x, gamma, EPS, backend=backend), launch["dy"], x)[0]}

    def weight_gradients(launch: Launch, leaves: Leaves) -> Tensors:
        return {"gamma": qk_norm_shard_gamma_grads(launch["x"], launch["dy"], EPS, *leaves, DEFAULT.canonical_tp, backend=backend)}

    def finish_weights(sums: Tensors) -> Tensors:
        return {"gamma": fold_pairs(list(sums["gamma"]), torch.add)}

    def specified(gradient: bool) -> Tensors:
        x, g = exact(rows["x"]), exact(gamma)
        y = reference.qk_norm(x, g, EPS)
        return dict(zip(("x", "gamma"), differentiate(y, rows["dy"].float(), x, g))) if gradient else {"y": y}

    return OperatorCase(shape, rows, forward, gradients, specified, weight_gradients, finish_weights)
