"""Where a value is rounded to its storage type, and what a compiler may not do in between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Storage = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class RoundingPoint:
    """One stored value of the forward pass: its trace name, the operator that produces it, its type, and what is rounded there."""

    name: str
    operator: str
    storage: Storage
    rounded: str


BEFORE_LAYERS = (RoundingPoint("embedding", "embedding", "bf16", "the owner's row, copied"),)
IN_LAYER = (
    RoundingPoint("input_norm", "rms_norm", "bf16", "x·rstd in fp32 to bf16, then times gamma to bf16; x is the rounded residual"),
    RoundingPoint("qkv", "det_gemm", "bf16", "fp32 accumulator, plain order"),
    RoundingPoint("q_norm", "qk_norm", "bf16", "as input_norm, per head"),
    RoundingPoint("k_norm", "qk_norm", "bf16", "as input_norm, per head"),
    RoundingPoint("q_rope", "rope", "bf16", "fp32 rotation without FMA, after q_norm"),
    RoundingPoint("k_rope", "rope", "bf16", "fp32 rotation without FMA, after k_norm"),
    RoundingPoint("v", "det_gemm", "bf16", "columns of qkv, copied"),
    RoundingPoint("attention", "attention", "bf16", "o/l"),
    RoundingPoint("o_proj", "det_gemm", "bf16", "root of the pair tree over fp32 shards"),
    RoundingPoint("attn_residual", "residual", "bf16", "sum of two bf16 values in fp32"),
    RoundingPoint("post_norm", "rms_norm", "bf16", "as input_norm"),
    RoundingPoint("gate_up", "det_gemm", "bf16", "fp32 accumulator, plain order"),
    RoundingPoint("swiglu", "swiglu", "bf16", "g/(1+exp(-g))·u in fp32, once"),
    RoundingPoint("down_proj", "det_gemm", "bf16", "root of the pair tree over fp32 shards"),
    RoundingPoint("mlp_residual", "residual", "bf16", "sum of two bf16 values in fp32"),
)
AFTER_LAYERS = (
    RoundingPoint("final_norm", "rms_norm", "bf16", "as input_norm"),
    RoundingPoint("logits", "lm_head", "fp32", "fp32 accumulator, never rounded to bf16"),
    RoundingPoint("logp", "logp", "fp32", "z/T - LSE, IEEE division by an fp32 tensor"),
)

GRADIENT_ROUNDING = {
    "logits": "bf16 of seed·([j = selected] - p)/T, held exactly in fp32; +0 off the support",
    "input of an operator": "bf16, one rounding",
    "dq, dk": "fp32 accumulator times the scale once, then bf16",
    "p, ds inside attention": "bf16",
    "gradients that meet at the residual": "fp32 sum, then bf16",
    "weights": "fp32, folded into fp32 main gradients, outside autograd",
}
"""Storage of each kind of gradient."""

NO_CONTRACTION = {"c++": "-ffp-contract=off", "nvcc": "--fmad=false", "triton": "enable_fp_fusion=False"}
"""What keeps each compiler from fusing a product and a sum: a fused multiply-add exists only where it is written."""


def trace_names(layers: int) -> tuple[str, ...]:
    """Names of all stored values of a model with ``layers`` layers, in the order they are computed."""
    inner = tuple(f"layers.{i}.{point.name}" for i in range(layers) for point in IN_LAYER)
    return (*(p.name for p in BEFORE_LAYERS), *inner, *(p.name for p in AFTER_LAYERS))
