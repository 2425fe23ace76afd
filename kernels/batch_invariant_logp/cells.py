"""Arguments of batch_invariant_logp at the dimensions of the contract."""

from __future__ import annotations

from typing import Any

import torch

from rlk.contract.numerics import DEFAULT
from rlk.contract.operators import OperatorShape
from rlk.kernels.batch_invariant_logp import (
    batch_invariant_logp,
    batch_invariant_logp_weight_grad,
    batch_invariant_logp_with_lse,
    reference,
)
from rlk.kernels.case import Draw, Launch, Leaves, OperatorCase, Tensors, differentiate, exact, leaf
from rlk.kernels.det_gemm import reference as gemm_reference
from rlk.kernels.lm_head import lm_head, lm_head_weight_grad
from rlk.kernels.lm_head import reference as lm_head_reference
from rlk.kernels.logp import logp_with_lse
from rlk.kernels.logp import reference as logp_reference
from rlk.kernels.logp.cells import draw_rows, vocabulary


def build(shape: OperatorShape, backend: str) -> OperatorCase:
    """sizes: hidden, vocab, padded; weight_rows: rows of the weight whose gradient is computed."""
    draw, vocab, padded = Draw(shape, backend), shape.sizes["vocab"], shape.sizes["padded"]
    wanted = shape.sizes["weight_rows"]
    weight = draw.weight(padded, shape.sizes["hidden"])
    weight[vocab:] = 0
    rows = {"hidden": draw.normal(draw.tokens, shape.sizes["hidden"]), **draw_rows(draw, vocab, padded)}

    def options(launch: Launch) -> dict[str, Any]:
        return {"support": launch["support"], "active": launch.live, "backend": backend}

    def forward(launch: Launch) -> Tensors:
        score, lse = batch_invariant_logp_with_lse(
            launch["hidden"], weight, launch["ids"], launch["temperature"], **vocabulary(shape), **options(launch)
        )
        return {"logp": score, "lse": lse}

    def gradients(launch: Launch) -> Tensors:
        hidden = leaf(launch["hidden"])
        score = batch_invariant_logp(hidden, weight, launch["ids"], launch["temperature"], **vocabulary(shape), **options(launch))
        return {"hidden": differentiate(score, launch["seed"], hidden)[0]}

    def weight_gradients(launch: Launch, leaves: Leaves) -> Tensors:
        dweight = batch_invariant_logp_weight_grad(
            launch["hidden"], weight, launch["ids"], launch["temperature"], forward(launch)["lse"], launch["seed"], *leaves,
            vocab_size=vocab, wanted=range(wanted), **options(launch),
        )  # fmt: skip
        return {"weight": dweight}

    def composed(launch: Launch) -> tuple[Tensors, Tensors]:
        hidden = leaf(launch["hidden"])
        logits = lm_head(hidden, weight, grad_splits=DEFAULT.canonical_tp, backend=backend)
        score, lse = logp_with_lse(logits, launch["ids"], launch["temperature"], **vocabulary(shape), **options(launch))
        dhidden, dlogits = differentiate(score, launch["seed"], hidden, logits)
        leaves = case.leaves(launch.placement, launch.placement.samples)
        dweight = lm_head_weight_grad(launch["hidden"], dlogits[:, :wanted].to(torch.bfloat16), *leaves, backend=backend)
        return {"logp": score.detach(), "lse": lse}, {"hidden": dhidden, "weight": dweight}

    def specified(gradient: bool) -> Tensors:
        hidden = exact(rows["hidden"])
        of_row = rows["ids"], rows["temperature"], vocab, rows["support"]
        if not gradient:
            return dict(zip(("logp", "lse"), reference.batch_invariant_logp(hidden, weight, *of_row)))
        logits = lm_head_reference.lm_head(hidden, weight)
        dhidden, dlogits = differentiate(logp_reference.logp(logits, *of_row), rows["seed"], hidden, logits)
        return {"hidden": dhidden, "weight": gemm_reference.det_gemm_weight_grad(rows["hidden"], dlogits[:, :wanted])}

    case = OperatorCase(shape, rows, forward, gradients, specified, weight_gradients, composed=composed)
    return case
