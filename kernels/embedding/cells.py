"""Arguments of embedding at the dimensions of the contract."""

from __future__ import annotations

import torch

from rlk.contract.operators import OperatorShape
from rlk.kernels.case import Draw, Launch, Leaves, OperatorCase, Tensors, differentiate, exact
from rlk.kernels.embedding import embedding, embedding_weight_grad, reference


def build(shape: OperatorShape, backend: str) -> OperatorCase:
    """sizes: width, vocab, padded. Every other token has one of seven ids, so that ids repeat; gradients differ in size by up to 2²², or no
    order of adding them could show."""
    draw, vocab, padded = Draw(shape, backend), shape.sizes["vocab"], shape.sizes["padded"]
    ids = draw.integers(vocab, draw.tokens)
    ids[::2] %= 7
    weight = draw.normal(padded, shape.sizes["width"])
    weight[vocab:] = 0
    sizes = torch.exp2(-(5.0 * torch.arange(draw.tokens, device=ids.device) % 23))
    rows = {"ids": ids, "dy": (draw.seed(draw.tokens, shape.sizes["width"]) * sizes[:, None]).to(torch.bfloat16)}

    def forward(launch: Launch) -> Tensors:
        return {"y": embedding(launch["ids"], weight, vocab, backend=backend)}

    def weight_gradients(launch: Launch, leaves: Leaves) -> Tensors:
        return {"weight": embedding_weight_grad(launch["ids"], launch["dy"], *leaves, padded, backend=backend)}

    def specified(gradient: bool) -> Tensors:
        w = exact(weight)
        y = reference.embedding(ids, w)
        return {"weight": differentiate(y, rows["dy"].float(), w)[0]} if gradient else {"y": y}

    return OperatorCase(shape, rows, forward, lambda launch: {}, specified, weight_gradients)
