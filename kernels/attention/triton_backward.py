"""Triton kernels of attention's backward pass. Every sum has one accumulator that one program owns, so block sizes change no byte."""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from rlk.kernels._triton.numerics import exp2, row_tree, with_quiet_nan
from rlk.kernels.attention.triton_forward import MINUS_INFINITY, describe, find_block, load_both, states_of


@triton.jit(do_not_specialize=["rows"])
def attention_delta(
    out, d_out, lse2, delta, copy, rows, out_row_stride, out_head_stride, d_out_row_stride, d_out_head_stride, sum_row_stride,
    sum_head_stride, HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, COPY: tl.constexpr,
):  # fmt: skip
    """delta = Σ dO·O over DIM by row tree, one per (query row, head); rows counts both. Grid: (blocks of rows,).

    COPY: also copy lse2 [query rows, HEADS] to where its heads are apart, as those of delta.
    """
    r = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    inside = (r < rows)[:, None] & (d < DIM)[None, :]
    row, head = r // HEADS, r % HEADS
    o = tl.load(out + (row * out_row_stride + head * out_head_stride)[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    do = tl.load(d_out + (row * d_out_row_stride + head * d_out_head_stride)[:, None] + d[None, :], mask=inside, other=0.0).to(tl.float32)
    at = row * sum_row_stride + head * sum_head_stride
    tl.store(delta + at, row_tree(o * do), mask=r < rows)
    if COPY:
        tl.store(copy + at, tl.load(lse2 + r, mask=r < rows), mask=r < rows)


@triton.jit
def slopes(t, dp, lse2, delta):
    """P and dS of scaled scores t and dP, both fp32."""
    p = exp2(t - lse2)
    return p, p * (dp - delta)


@triton.jit
def add_keys(
    dq, queries, d_outs, lse2, delta, positions, low, high, k, v, k_row_stride, v_row_stride, c,
    DIM: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """dq continued over the keys low … high-1. MASKED: some row does not see some of them."""
    BLOCK_D: tl.constexpr = queries.shape[1]
    d = tl.arange(0, BLOCK_D)
    for start in range(low, high, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k_at = k + (key.to(tl.int64) * k_row_stride)[:, None] + d[None, :]
        v_at = v + (key.to(tl.int64) * v_row_stride)[:, None] + d[None, :]
        keys, values = load_both(k_at, v_at, (key < high)[:, None] & (d < DIM)[None, :], MASKED or DIM != BLOCK_D)
        t = tl.dot(queries, tl.trans(keys)) * c
        if MASKED:
            t = tl.where(key[None, :] <= positions[:, None], t, MINUS_INFINITY)
        dp = tl.dot(d_outs, tl.trans(values))
        _, ds = slopes(t, dp, lse2[:, None], delta[:, None])
        dq = tl.dot(ds.to(tl.bfloat16), keys, dq)
    return dq


@triton.jit(do_not_specialize=["count", "tokens"])
def attention_query_gradient(
    q, k, v, d_out, lse2, delta, dq, segments, count, tokens, c, scale, q_row_stride, q_head_stride, k_row_stride, k_head_stride,
    v_row_stride, v_head_stride, d_out_row_stride, d_out_head_stride, sum_row_stride, sum_head_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """dq [rows, heads, DIM] of one block of positions of one segment and one KV head. Grid: (blocks, KV heads)."""
    STEP: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1) * GROUP
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    segment, offset = find_block(segments, count, block, KIND, STEP)
    row, rows, position, other, _ = describe(segments, segments, tokens, segment, KIND)
    if (offset < 0) | (offset >= rows):
        return
    place, at, head, real = states_of(row, rows, offset, kv_head, GROUP, BLOCK_M)
    positions = position + place
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + (at * q_row_stride + head * q_head_stride)[:, None] + d[None, :], mask=inside, other=0.0)
    d_outs = tl.load(d_out + (at * d_out_row_stride + head * d_out_head_stride)[:, None] + d[None, :], mask=inside, other=0.0)
    sums_at = at * sum_row_stride + head * sum_head_stride
    row_lse2 = tl.load(lse2 + sums_at, mask=real, other=0.0)
    row_delta = tl.load(delta + sums_at, mask=real, other=0.0)
    k += kv_head * k_head_stride + other.to(tl.int64) * k_row_stride
    v += kv_head * v_head_stride + other.to(tl.int64) * v_row_stride
    end = position + tl.minimum(offset + STEP, rows)
    plain = (position + offset + 1) // BLOCK_N * BLOCK_N
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    sums = add_keys(
        sums, queries, d_outs, row_lse2, row_delta, positions, 0, plain, k, v, k_row_stride, v_row_stride, c, DIM, BLOCK_N, False
    )  # fmt: skip
    sums = add_keys(
        sums, queries, d_outs, row_lse2, row_delta, positions, plain, end, k, v, k_row_stride, v_row_stride, c, DIM, BLOCK_N, True
    )  # fmt: skip
    tl.store(dq + (at * heads + head)[:, None] * DIM + d[None, :], with_quiet_nan(sums * scale, tl.bfloat16), mask=inside)


@triton.jit
def add_queries(
    dk, dv, keys, values, key, low, high, q, d_out, lse2, delta, q_row_stride, q_head_stride, d_out_row_stride, d_out_head_stride,
    sum_row_stride, sum_head_stride, c, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dk and dv continued over the queries low … high-1 of the heads of a group, one head after the other.

    Queries beyond the last are rows of +0 whose lse2 and delta are 0: P = 1, dO = 0 and dS = 0 add nothing.
    """
    BLOCK_D: tl.constexpr = keys.shape[1]
    d = tl.arange(0, BLOCK_D)
    blocks = tl.cdiv(high - low, BLOCK_M)
    for i in range(GROUP * blocks):  # one loop over both, so that the first loads of a head do not wait for the last product before it
        member = i // blocks
        query = low + (i - member * blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
        there = query < high
        live = there[:, None] & (d < DIM)[None, :]
        row = query.to(tl.int64)
        queries = tl.load(q + member * q_head_stride + (row * q_row_stride)[:, None] + d[None, :], mask=live, other=0.0)
        d_outs = tl.load(d_out + member * d_out_head_stride + (row * d_out_row_stride)[:, None] + d[None, :], mask=live, other=0.0)
        sums_at = member * sum_head_stride + row * sum_row_stride
        row_lse2 = tl.load(lse2 + sums_at, mask=there, other=0.0)
        row_delta = tl.load(delta + sums_at, mask=there, other=0.0)
        t = tl.dot(keys, tl.trans(queries)) * c
        t = tl.where(key[:, None] <= query[None, :], t, MINUS_INFINITY)
        dp = tl.dot(values, tl.trans(d_outs))
        p, ds = slopes(t, dp, row_lse2[None, :], row_delta[None, :])
        dv = tl.dot(p.to(tl.bfloat16), d_outs, dv)
        dk = tl.dot(ds.to(tl.bfloat16), queries, dk)
    return dk, dv


@triton.jit(do_not_specialize=["count", "tokens"])
def attention_key_gradient(
    q, k, v, d_out, lse2, delta, dk, dv, segments, count, tokens, c, scale, q_row_stride, q_head_stride, k_row_stride, k_head_stride,
    v_row_stride, v_head_stride, d_out_row_stride, d_out_head_stride, sum_row_stride, sum_head_stride,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """dk and dv [rows, KV heads, DIM] of one block of keys of one segment and one KV head. Grid: (blocks, KV heads).

    One accumulator each: query heads of the group ascending, then queries in groups of 16 from position 0. Groups before the block see none
    of its keys and are left out.
    """
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    segment, offset = find_block(segments, count, tl.program_id(0), KIND, BLOCK_N)
    row, rows, position, other, length = describe(segments, segments, tokens, segment, KIND)
    if (offset < 0) | (offset >= rows):
        return
    place = offset + tl.arange(0, BLOCK_N)
    real = place < rows
    key = position + place
    at = (row + place).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (d < DIM)[None, :]
    keys = tl.load(k + (at * k_row_stride + kv_head * k_head_stride)[:, None] + d[None, :], mask=inside, other=0.0)
    values = tl.load(v + (at * v_row_stride + kv_head * v_head_stride)[:, None] + d[None, :], mask=inside, other=0.0)
    first = (position + offset) // 16 * 16
    sum_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    sum_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    q += kv_head * GROUP * q_head_stride + other.to(tl.int64) * q_row_stride
    d_out += kv_head * GROUP * d_out_head_stride + other.to(tl.int64) * d_out_row_stride
    lse2 += kv_head * GROUP * sum_head_stride + other.to(tl.int64) * sum_row_stride
    delta += kv_head * GROUP * sum_head_stride + other.to(tl.int64) * sum_row_stride
    sum_k, sum_v = add_queries(
        sum_k, sum_v, keys, values, key, first, length, q, d_out, lse2, delta, q_row_stride, q_head_stride, d_out_row_stride,
        d_out_head_stride, sum_row_stride, sum_head_stride, c, GROUP, DIM, BLOCK_M,
    )  # fmt: skip
    result = (at * kv_heads + kv_head)[:, None] * DIM + d[None, :]
    tl.store(dk + result, with_quiet_nan(sum_k * scale, tl.bfloat16), mask=inside)
    tl.store(dv + result, with_quiet_nan(sum_v, tl.bfloat16), mask=inside)
