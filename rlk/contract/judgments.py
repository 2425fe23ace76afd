"""What is judged of every operator, and within which tolerance. No backend may relax these numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rlk.contract.arithmetic import Storage
from rlk.contract.numerics import ContractError

OpClass = Literal["elementwise", "reduction", "attention", "logprob"]


@dataclass(frozen=True)
class Judgment:
    """One of the four questions asked of an operator: about its forward pass or its gradient, within a tolerance or byte for byte."""

    name: str
    gradient: bool
    exact: bool
    question: str


FORWARD_ACCURACY = Judgment("forward_accuracy", False, False, "is the candidate close to the fp32 reference on the same inputs?")
GRADIENT_ACCURACY = Judgment("gradient_accuracy", True, False, "are its gradients close to the reference's?")
FORWARD_INVARIANCE = Judgment("forward_invariance", False, True, "do transformed layouts give the canonical layout's bytes?")
GRADIENT_INVARIANCE = Judgment("gradient_invariance", True, True, "do their gradients?")
JUDGMENTS = (FORWARD_ACCURACY, GRADIENT_ACCURACY, FORWARD_INVARIANCE, GRADIENT_INVARIANCE)


@dataclass(frozen=True)
class Tolerance:
    """|candidate - reference| <= atol + rtol·|reference|, elementwise."""

    atol: float
    rtol: float

    def allows(self, candidate: float, reference: float) -> bool:
        """Whether one element passes; NaN and infinities never do."""
        if not (math.isfinite(candidate) and math.isfinite(reference)):
            return False
        return abs(candidate - reference) <= self.atol + self.rtol * abs(reference)


TOLERANCES: dict[tuple[OpClass, Storage], tuple[Tolerance, Tolerance]] = {
    ("elementwise", "bf16"): (Tolerance(2e-2, 1.6e-2), Tolerance(2e-2, 1.6e-2)),
    ("reduction", "bf16"): (Tolerance(5e-2, 2e-2), Tolerance(1e-1, 2e-2)),
    ("attention", "bf16"): (Tolerance(5e-2, 2e-2), Tolerance(5e-2, 2e-2)),
    ("logprob", "bf16"): (Tolerance(6e-2, 0.0), Tolerance(5e-2, 0.0)),
    ("elementwise", "fp32"): (Tolerance(1e-5, 1e-5), Tolerance(1e-5, 1e-5)),
    ("reduction", "fp32"): (Tolerance(1e-4, 1e-4), Tolerance(1e-4, 1e-4)),
    ("attention", "fp32"): (Tolerance(1e-4, 1e-4), Tolerance(1e-4, 1e-4)),
    ("logprob", "fp32"): (Tolerance(1e-5, 0.0), Tolerance(1e-5, 0.0)),
}
"""(class, storage) -> (forward, gradient). GEMM is of class reduction."""

LAYOUT_TRANSFORMS = (
    "batch_neighbours", "batch_size_one", "permutation", "padding_left", "padding_right", "packing", "chunking", "tile_position",
    "decode_against_prefill",
)  # fmt: skip
"""Layouts in which every real token keeps the bytes of the canonical one (samples packed in id order)."""


@dataclass(frozen=True)
class Operator:
    """One judged operator.

    op_class: class of the forward pass; gradient_class: class of its gradients (a weight gradient is a reduction whatever the operator).
    outputs, gradients: every value that is judged; a gradient is named after what it is the gradient of.
    depends_on: operators whose arithmetic it uses, so that a change there is judged here too.
    composed: its bytes are those of the operators it depends on, run one after another.
    fp32: values without any bf16 rounding on the way to them, judged within the fp32 tolerance of the operator's class; all others within
    that of bf16. The class logprob has an fp32 tolerance for fp32 logits; an operator that makes its logits out of bf16 hidden states and
    weights also has the error of that product, for which lm_head alone may be ten times as far off, and is judged by its inputs: bf16.
    """

    name: str
    op_class: OpClass
    gradient_class: OpClass
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]
    depends_on: tuple[str, ...] = ()
    composed: bool = False
    fp32: tuple[str, ...] = ()

    def storage(self, value: str) -> Storage:
        """Which tolerance an output or a gradient is judged within."""
        return "fp32" if value in self.fp32 else "bf16"


OPERATORS = (
    Operator("embedding", "elementwise", "reduction", ("y",), ("weight",), fp32=("weight",)),
    Operator("rms_norm", "reduction", "reduction", ("y",), ("x", "gamma")),
    Operator("qk_norm", "reduction", "reduction", ("y",), ("x", "gamma"), ("rms_norm",)),
    Operator("det_gemm", "reduction", "reduction", ("y",), ("x", "weight"), fp32=("weight",)),
    Operator("rope", "elementwise", "elementwise", ("y",), ("x",)),
    Operator("attention", "attention", "attention", ("out",), ("q", "k", "v")),
    Operator("silu", "elementwise", "elementwise", ("y",), ("x",)),
    Operator("swiglu", "elementwise", "elementwise", ("y",), ("gate_up",), ("silu",)),
    Operator(
        "lm_head", "reduction", "reduction", ("logits",), ("hidden", "weight"), ("det_gemm",), composed=True, fp32=("logits", "weight")
    ),
    Operator("logp", "logprob", "logprob", ("logp", "lse"), ("logits",), fp32=("logp", "lse")),
    Operator(
        "batch_invariant_logp", "logprob", "logprob", ("logp", "lse"), ("hidden", "weight"), ("lm_head", "logp"), composed=True,
    ),
    Operator("pack", "elementwise", "elementwise", ("packed", "unpacked"), ("padded", "rows")),
)  # fmt: skip
"""The twelve operators, each after those it depends on."""

NEGATIVE_CONTROLS = ("flipped_bit", "negative_zero", "offset_logprob", "stale_weight_version")
"""Planted faults that every run must catch."""


def operator(name: str) -> Operator:
    """Operator by name; raises ContractError for an unknown one."""
    for op in OPERATORS:
        if op.name == name:
            return op
    raise ContractError(f"{name} is not an operator of the contract: use one of {', '.join(op.name for op in OPERATORS)}")


def tolerance(name: str, judgment: Judgment, storage: Storage) -> Tolerance:
    """Tolerance of an accuracy judgment; an invariance judgment has none and raises ContractError."""
    if judgment.exact:
        raise ContractError(f"{judgment.name} of {name} has no tolerance: compare bytes")
    op = operator(name)
    forward, gradient = TOLERANCES[op.gradient_class if judgment.gradient else op.op_class, storage]
    return gradient if judgment.gradient else forward
