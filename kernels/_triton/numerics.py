"""Arithmetic shared by every Triton kernel. A formula that two kernels share is one function here.

Compiled with ``enable_fp_fusion=False``. A sum inside a row is a fold of halves: every step is ``tl.reduce`` over an axis of exactly two
elements, one addition, whose value cannot depend on the layout, as that of ``tl.sum`` does.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
QUIET_NAN: tl.constexpr = tl.constexpr(0x7FC0)


@triton.jit
def _add(a, b):
    return a + b


@triton.jit
def row_tree(x):
    """Row tree over the last axis of [rows, width], width a power of two: the upper half onto the lower until one is left. [rows]."""
    if x.shape[1] == 1:
        return tl.reshape(x, (x.shape[0],))
    else:  # noqa: RET505
        return row_tree(tl.reduce(tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2)), 1, _add))


@triton.jit
def column_tree(x):
    """Row tree over the first axis of [rows, width], rows a power of two. [width]."""
    if x.shape[0] == 1:
        return tl.reshape(x, (x.shape[1],))
    else:  # noqa: RET505
        return column_tree(tl.reduce(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), 0, _add))


@triton.jit
def pair_tree(x):
    """Balanced tree of adjacent pairs over the first axis of [parts, width], parts a power of two. [width]."""
    if x.shape[0] == 1:
        return tl.reshape(x, (x.shape[1],))
    else:  # noqa: RET505
        return pair_tree(tl.reduce(tl.reshape(x, (x.shape[0] // 2, 2, x.shape[1])), 1, _add))


@triton.jit
def bf16(x):
    """fp32 rounded to the nearest bf16, ties to even, as fp32."""
    return x.to(tl.bfloat16).to(tl.float32)


@triton.jit
def with_quiet_nan(x, dtype: tl.constexpr):
    """x in ``dtype`` (bf16 or fp32, round to nearest even), every NaN as the one quiet NaN 0x7fc0(0000)."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
        return tl.where(x != x, QUIET_NAN, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505
        return tl.where(x != x, float("nan"), x).to(dtype)


@triton.jit
def exp2(x):
    """exp2, the only one of the Triton backend: the card's own instruction. exp2(0) = 1, exp2(-inf) = +0."""
    return tl.exp2(x)


@triton.jit
def exp(x):
    """exp, the only one of the Triton backend: exp2 of the rounded product x·log2 e. exp(0) = 1, exp(-inf) = +0."""
    return tl.exp2(x * LOG2_E)


@triton.jit
def log2(x):
    """log2, the only one of the Triton backend: the card's own instruction. log2(1) = +0."""
    return tl.log2(x)


@triton.jit
def log(x):
    """Natural logarithm, the only one of the Triton backend: log2 times ln 2, rounded twice. log(1) = +0."""
    return tl.log2(x) * LN_2


@triton.jit
def reciprocal_root(mean, eps):
    """1/sqrt(mean + eps), addition, square root and division IEEE."""
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def sigmoid(x):
    """1/(1 + exp(-x)), division IEEE."""
    return tl.div_rn(1.0, 1.0 + exp(-x))


@triton.jit
def silu(x):
    """x/(1 + exp(-x)), division IEEE."""
    return tl.div_rn(x, 1.0 + exp(-x))


@triton.jit
def silu_slope(x):
    """d silu/dx = s·(1 + x·(1 - s)) with s = sigmoid(x)."""
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))
