"""Arguments of logp at the dimensions of the contract."""

from __future__ import annotations

from typing import Any

import torch

from rlk.contract.numerics import DEFAULT
from rlk.contract.operators import OperatorShape
from rlk.kernels.case import Draw, Launch, OperatorCase, Tensors, differentiate, exact, leaf
from rlk.kernels.logp import logp, logp_with_lse, reference

TEMPERATURES = (1.0, 0.7, 1.3)


def draw_rows(draw: Draw, vocab: int, padded: int) -> Tensors:
    """ids, temperature, support and seed of every token."""
    ids = draw.integers(vocab, draw.tokens)
    temperature = torch.tensor(TEMPERATURES, device=ids.device)[torch.arange(draw.tokens, device=ids.device) % len(TEMPERATURES)]
    seed = draw.seed(draw.tokens, dtype=torch.float32)
    return {"ids": ids, "temperature": temperature, "support": draw.support(ids, vocab, padded), "seed": seed}


def vocabulary(shape: OperatorShape) -> dict[str, Any]:
    """How the vocabulary is padded, sharded and tiled."""
    sizes = {"vocab_size": shape.sizes["vocab"], "padded_vocab": shape.sizes["padded"]}
    return {**sizes, "shards": DEFAULT.canonical_tp, "vocab_tile": DEFAULT.vocab_tile}


def build(shape: OperatorShape, backend: str) -> OperatorCase:
    """sizes: vocab, padded. Padded columns of the logits are NaN: reading one of them shows."""
    draw, vocab, padded = Draw(shape, backend), shape.sizes["vocab"], shape.sizes["padded"]
    logits = draw.normal(draw.tokens, padded, scale=2, dtype=torch.float32)
    logits[:, vocab:] = torch.nan
    rows = {"logits": logits, **draw_rows(draw, vocab, padded)}

    def options(launch: Launch) -> dict[str, Any]:
        return {**vocabulary(shape), "support": launch["support"], "active": launch.live, "backend": backend}

    def forward(launch: Launch) -> Tensors:
        score, lse = logp_with_lse(launch["logits"], launch["ids"], launch["temperature"], **options(launch))
        return {"logp": score, "lse": lse}

    def gradients(launch: Launch) -> Tensors:
        logits = leaf(launch["logits"])
        score = logp(logits, launch["ids"], launch["temperature"], **options(launch))
        return {"logits": differentiate(score, launch["seed"], logits)[0]}

    def specified(gradient: bool) -> Tensors:
        logits = exact(rows["logits"])
        score = reference.logp(logits, rows["ids"], rows["temperature"], vocab, rows["support"])
        if gradient:
            return {"logits": differentiate(score, rows["seed"], logits)[0]}
        return {"logp": score, "lse": logits.gather(1, rows["ids"][:, None])[:, 0] / rows["temperature"] - score}

    return OperatorCase(shape, rows, forward, gradients, specified)
