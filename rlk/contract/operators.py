"""Dimensions at which each operator is judged: tier ``short`` at the widths of a small model, tier ``primary`` at those of Qwen3-8B.

The primary tier never reduces what an operator sums over (hidden size, vocabulary, keys) nor the number of heads. Where a whole output is
too large for a CPU, a shape holds a sample of its columns (or of its weight rows) and says so.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from rlk.contract.judgments import LAYOUT_TRANSFORMS, OPERATORS, Judgment, operator
from rlk.contract.models import QWEN3_8B, TINY
from rlk.contract.numerics import ContractError, padded_vocab_size
from rlk.contract.workloads import GEMM_ROWS, WS1, RaggedBatch

Tier = Literal["short", "primary"]
TIERS: tuple[Tier, ...] = ("short", "primary")

THREADS, COMPOSITION = "thread_count", "composition"
"""Compared besides the layouts: another number of threads (CPU); the operators that it is composed of, one after another."""

GEMM_8 = RaggedBatch(lengths=(3, 5), prompt=1, permutation=(1, 0), chunk=2, pad_to=6)
LOGPROB_4 = RaggedBatch(lengths=(1, 3), prompt=0, permutation=(1, 0), chunk=2, pad_to=4)
LOGPROB_27 = RaggedBatch(lengths=tuple(n - WS1.prompt for n in WS1.lengths), prompt=0, permutation=(2, 0, 3, 1), chunk=7, pad_to=12)
LONG = RaggedBatch(lengths=(2048, 65), prompt=64, permutation=(1, 0), chunk=512, pad_to=2050)
"""A prompt of two thousand tokens beside 65 rows: short prompts have hidden real faults."""
ONE_OF_8 = RaggedBatch(lengths=(8,), prompt=1, permutation=(0,), chunk=7, pad_to=10)
FOUR_OF_19 = RaggedBatch(lengths=(19, 19, 19, 19), prompt=8, permutation=(2, 0, 3, 1), chunk=7, pad_to=20)
ONE_OF_32 = RaggedBatch(lengths=(32,), prompt=31, permutation=(0,), chunk=7, pad_to=33)

EDGES = (*(n for n in GEMM_ROWS if n >= 16), 2048)
LONG_LAYOUTS = ("batch_size_one", "permutation", "chunking", "decode_against_prefill", THREADS)


@dataclass(frozen=True)
class OperatorShape:
    """One set of dimensions of one operator.

    sizes: dimensions by name, as the operator's ``cells.py`` reads them. neighbours, shifts: see ``rlk.contract.layouts.placements``.
    judged: outputs and gradients judged at this shape, () for all. compared: layouts compared at this shape, () for all.
    """

    name: str
    batch: RaggedBatch
    sizes: dict[str, int] = field(hash=False)
    neighbours: tuple[int, ...] = (65,)
    shifts: tuple[int, ...] = (1, 7)
    judged: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()


_PADDED = QWEN3_8B.padded_vocab()
_HEADS = {"heads": QWEN3_8B.q_heads, "dim": QWEN3_8B.head_dim}
_TINY_HEADS = {"heads": TINY.q_heads, "dim": TINY.head_dim}
_ATTENTION = {"q_heads": QWEN3_8B.q_heads, "kv_heads": QWEN3_8B.kv_heads, "dim": QWEN3_8B.head_dim, "page": 16}
_TINY_ATTENTION = {"q_heads": TINY.q_heads, "kv_heads": TINY.kv_heads, "dim": TINY.head_dim, "page": 16}
_TWO_TILES = {"vocab": 8 * 1500, "padded": padded_vocab_size(8 * 1500, 8)}
_TINY_VOCABULARY = {"vocab": TINY.vocab_size, "padded": TINY.padded_vocab()}
_VOCABULARY = {"vocab": QWEN3_8B.vocab_size, "padded": _PADDED}


def _short(sizes: dict[str, int], name: str = "ws1") -> OperatorShape:
    return OperatorShape(name, WS1, sizes, EDGES, (1, 7, 15, 16))


def _m59(sizes: dict[str, int]) -> OperatorShape:
    return OperatorShape("m59", WS1, sizes)


def _long(
    sizes: dict[str, int], name: str = "long", judged: tuple[str, ...] = (), compared: tuple[str, ...] = LONG_LAYOUTS
) -> OperatorShape:
    return OperatorShape(name, LONG, sizes, judged=judged, compared=compared)


SHAPES: dict[str, dict[Tier, tuple[OperatorShape, ...]]] = {
    "embedding": {
        "short": (_short({"width": TINY.hidden, **_TINY_VOCABULARY}),),
        "primary": (_m59({"width": 16, **_VOCABULARY}), _long({"width": 16, **_VOCABULARY})),  # 16 of 4096 columns
    },
    "rms_norm": {
        "short": (_short({"width": TINY.hidden}),),
        "primary": (_m59({"width": QWEN3_8B.hidden}), _long({"width": QWEN3_8B.hidden})),
    },
    "qk_norm": {"short": (_short(_TINY_HEADS),), "primary": (_m59(_HEADS), _long(_HEADS))},
    "det_gemm": {
        "short": (
            _short({"k": 128, "n": 1024, "splits": 1, "grad_splits": 8, "weight_rows": 128}, "qkv"),
            _short({"k": 512, "n": 128, "splits": 8, "grad_splits": 1, "weight_rows": 128}, "o_proj"),
        ),
        # the weight gradient holds 256 of the weight's rows; the long prompt 256 rows of the weight, or 64 columns of the input gradient
        "primary": (
            OperatorShape("m8", GEMM_8, {"k": 4096, "n": 4096, "splits": 8, "grad_splits": 1, "weight_rows": 256}, (33,)),
            _m59({"k": 4096, "n": 12288, "splits": 1, "grad_splits": 8, "weight_rows": 256}),
            _long({"k": 4096, "n": 256, "splits": 1, "grad_splits": 1, "weight_rows": 256}, judged=("y", "weight")),
            _long({"k": 64, "n": 12288, "splits": 1, "grad_splits": 8, "weight_rows": 16}, "long_input", judged=("x",)),
        ),
    },
    "rope": {
        "short": (_short({"positions": TINY.max_positions, **_TINY_HEADS}),),
        "primary": (_m59({"positions": QWEN3_8B.max_positions, **_HEADS}), _long({"positions": QWEN3_8B.max_positions, **_HEADS})),
    },
    "attention": {
        "short": (_short(_TINY_ATTENTION),),
        "primary": (
            OperatorShape("b1_sq8", ONE_OF_8, _ATTENTION, (33,)),
            OperatorShape("b4_sq19", FOUR_OF_19, _ATTENTION, (129,)),
            OperatorShape("sq1_skv32", ONE_OF_32, _ATTENTION),
            _long(_ATTENTION, compared=("chunking", "decode_against_prefill")),
        ),
    },
    "silu": {
        "short": (_short({"width": TINY.intermediate}),),
        "primary": (_m59({"width": QWEN3_8B.intermediate}), _long({"width": 256})),  # long: 256 of 12288 columns
    },
    "swiglu": {
        "short": (_short({"width": TINY.intermediate, "shards": 8}),),
        "primary": (_m59({"width": QWEN3_8B.intermediate, "shards": 8}), _long({"width": 256, "shards": 8})),
    },
    "lm_head": {
        "short": (_short({"k": TINY.hidden, "n": TINY.padded_vocab(), "weight_rows": 128}),),
        # 256 of the weight gradient's rows; the long prompt holds 1024 columns of the logits
        "primary": (
            OperatorShape("m4", LOGPROB_4, {"k": QWEN3_8B.hidden, "n": _PADDED, "weight_rows": 256}, (27,), (3,)),
            _long({"k": QWEN3_8B.hidden, "n": 1024, "weight_rows": 256}, judged=("logits", "weight")),
        ),
    },
    "logp": {
        "short": (OperatorShape("ws1", WS1, _TWO_TILES, (33, 65), (1, 16)),),
        "primary": (
            OperatorShape("m4", LOGPROB_4, _VOCABULARY, (27,), (3,)),
            OperatorShape("m27", LOGPROB_27, _VOCABULARY, (33,), (1,)),
        ),
    },
    "batch_invariant_logp": {
        "short": (
            OperatorShape("ws1", WS1, {"hidden": TINY.hidden, "weight_rows": 1600, **_TWO_TILES}, (33, 65), (1,)),
            _long({"hidden": TINY.hidden, "weight_rows": 300, **_TINY_VOCABULARY}),
        ),
        "primary": (OperatorShape("m4", LOGPROB_4, {"hidden": QWEN3_8B.hidden, "weight_rows": 256, **_VOCABULARY}, (27,), (3,)),),
    },
    "pack": {
        "short": (_short({"width": TINY.hidden}),),
        "primary": (_m59({"width": QWEN3_8B.hidden}), _long({"width": QWEN3_8B.hidden})),
    },
}


def shape(name: str, shape_name: str) -> OperatorShape:
    """Shape of an operator by name; raises ContractError for an unknown one."""
    shapes = {s.name: s for tier in TIERS for s in SHAPES[operator(name).name][tier]}
    if shape_name not in shapes:
        raise ContractError(f"{name} has no shape {shape_name!r}: use one of {', '.join(shapes)}")
    return shapes[shape_name]


def judged_shapes(name: str, tier: Tier) -> tuple[tuple[str, OperatorShape], ...]:
    """(operator, shape) that a cell of operator ``name`` judges: its own shapes of the tier, and the short ones of its dependencies.

    A dependency, which has cells of its own, is judged among fewer neighbours here.
    """
    own = [(name, at) for at in SHAPES[name][tier]]
    borrowed = [(other, at) for other in dependencies(name) for at in SHAPES[other]["short"]]
    return (*own, *((other, replace(at, neighbours=(at.batch.packed + 6,), shifts=(1,))) for other, at in borrowed))


def compared(name: str, judgment: Judgment) -> tuple[str, ...]:
    """Layouts and the like that an invariance judgment of an operator compares with the canonical layout."""
    layouts = [n for n in LAYOUT_TRANSFORMS if not (judgment.gradient and n == "decode_against_prefill")]
    return (*layouts, THREADS, *((COMPOSITION,) if operator(name).composed else ()))


def evidence_names(name: str, tier: Tier, judgment: Judgment) -> tuple[str, ...]:
    """What a judgment of an operator must hand in: ``operator.shape.value`` (accuracy) or ``operator.shape.value/layout`` (invariance).

    Operators that it depends on are judged again in the same cell, at their short shapes.
    """
    return tuple(n for other, at in judged_shapes(name, tier) for n in shape_evidence(other, at, judgment))


def shape_evidence(name: str, at: OperatorShape, judgment: Judgment) -> tuple[str, ...]:
    """:func:`evidence_names` of one shape."""
    values = [v for v in values_of(name, judgment) if not at.judged or v in at.judged]
    if not judgment.exact:
        return tuple(f"{name}.{at.name}.{value}" for value in values)
    layouts = [n for n in compared(name, judgment) if not at.compared or n in at.compared]
    return tuple(f"{name}.{at.name}.{value}/{layout}" for value in values for layout in layouts)


def values_of(name: str, judgment: Judgment) -> tuple[str, ...]:
    """Outputs, or gradients, that a judgment looks at."""
    return operator(name).gradients if judgment.gradient else operator(name).outputs


def dependencies(name: str) -> tuple[str, ...]:
    """Operators whose arithmetic ``name`` uses, directly or through another, in the order of the contract."""
    found: set[str] = set()
    todo = list(operator(name).depends_on)
    while todo:
        dependency = todo.pop()
        found.add(dependency)
        todo += operator(dependency).depends_on
    return tuple(op.name for op in OPERATORS if op.name in found)
