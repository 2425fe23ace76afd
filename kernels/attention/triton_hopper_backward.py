"""Gradients of keys and values for Hopper cards: warps that load queries, and two groups of warps that own 64 keys each.

Same bytes as rlk.kernels.attention.triton_backward. While one product runs, the exponentials or differences of another are computed.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rlk.kernels._triton.numerics import exp2, with_quiet_nan
from rlk.kernels.attention.triton_forward import MINUS_INFINITY, describe
from rlk.kernels.attention.triton_hopper import DIM, HALF, copy_to_shared, find_block, rounded


@gluon.jit
def load_queries(
    q, d_out, lse2, delta, q_row_stride, q_head_stride, d_out_row_stride, d_out_head_stride, sum_row_stride, sum_head_stride, low, high,
    ring, GROUP: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies the queries low … high-1 of every head of a group, one head after the other, and what belongs to them; rows beyond are +0."""
    q_tiles, o_tiles, l_tiles, d_tiles, ready, free = ring
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(1, wide))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, wide))
    lane = gl.arange(0, BLOCK, layout=lanes)
    blocks = gl.cdiv(high - low, BLOCK)
    for i in range(GROUP * blocks):
        member = i // blocks
        start = low + (i - member * blocks) * BLOCK
        slot = i % STAGES
        mbarrier.wait(free.index(slot), (i // STAGES & 1) ^ 1)
        query = start + column
        live = (query < high)[:, None] & (d < DIM)[None, :]
        row = query.to(gl.int64)
        copy_to_shared(q_tiles.index(slot), q + member * q_head_stride + (row * q_row_stride)[:, None] + d[None, :], mask=live)
        copy_to_shared(o_tiles.index(slot), d_out + member * d_out_head_stride + (row * d_out_row_stride)[:, None] + d[None, :], mask=live)
        one = start + lane
        at = member * sum_head_stride + one.to(gl.int64) * sum_row_stride
        copy_to_shared(l_tiles.index(slot), lse2 + at, mask=one < high)
        copy_to_shared(d_tiles.index(slot), delta + at, mask=one < high)
        async_copy.mbarrier_arrive(ready.index(slot), increment_count=False)


@gluon.jit
def add_queries(
    k, v, dk, dv, c, scale, row, rows, position, offset, kv_head, kv_heads, k_row_stride, k_head_stride, v_row_stride, v_head_stride, low,
    high, k_tile, v_tile, ring, HALF_OF: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of the keys HALF_OF·64 … HALF_OF·64 + 63 of a block."""
    q_tiles, o_tiles, l_tiles, d_tiles, ready, free = ring
    t_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    g_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, g_layout, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    place = offset + HALF_OF * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, wide))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, wide))
    real = (place < rows)[:, None] & (d < DIM)[None, :]
    at = (row + place).to(gl.int64)
    k_tile.store(gl.load(k + (at * k_row_stride + kv_head * k_head_stride)[:, None] + d[None, :], mask=real, other=0.0))
    v_tile.store(gl.load(v + (at * v_row_stride + kv_head * v_head_stride)[:, None] + d[None, :], mask=real, other=0.0))
    fence_async_shared()
    key = position + offset + HALF_OF * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, t_layout))
    column = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, t_layout))
    none = gl.zeros([HALF, BLOCK], gl.float32, layout=t_layout)
    sum_k = gl.zeros([HALF, DIM], gl.float32, layout=g_layout)
    sum_v = gl.zeros([HALF, DIM], gl.float32, layout=g_layout)
    blocks = gl.cdiv(high - low, BLOCK)
    for i in range(GROUP * blocks):
        slot = i % STAGES
        mbarrier.wait(ready.index(slot), i // STAGES & 1)
        scores = warpgroup_mma(k_tile, q_tiles.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        slopes = warpgroup_mma(v_tile, o_tiles.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
        row_lse2 = l_tiles.index(slot).load(gl.SliceLayout(0, t_layout))
        row_delta = d_tiles.index(slot).load(gl.SliceLayout(0, t_layout))
        scores = warpgroup_mma_wait(1, deps=[scores])
        t = scores * c
        query = low + (i % blocks) * BLOCK
        if query < position + offset + HALF_OF * HALF + HALF - 1:  # some query does not see some key
            t = gl.where(key[:, None] <= (query + column)[None, :], t, MINUS_INFINITY)
        p = exp2(t - row_lse2[None, :])
        weights = gl.convert_layout(rounded(p), operand)
        mbarrier.wait(ready.index(slot), i // STAGES & 1)  # passed already; keeps the compiler from moving P behind the next wait
        pending_v = warpgroup_mma(weights, o_tiles.index(slot), sum_v, is_async=True)
        slopes = warpgroup_mma_wait(1, deps=[slopes])
        ds = gl.convert_layout(rounded(p * (slopes - row_delta[None, :])), operand)
        pending_k = warpgroup_mma(ds, q_tiles.index(slot), sum_k, is_async=True)
        sum_k, sum_v, weights, ds = warpgroup_mma_wait(0, deps=[pending_k, pending_v, weights, ds])
        mbarrier.arrive(free.index(slot), count=1)
    result = (at * kv_heads + kv_head)[:, None] * DIM + d[None, :]
    k_tile.store(with_quiet_nan(sum_k * scale, gl.bfloat16))
    gl.store(dk + result, k_tile.load(wide), mask=real)
    v_tile.store(with_quiet_nan(sum_v, gl.bfloat16))
    gl.store(dv + result, v_tile.load(wide), mask=real)


@gluon.jit(do_not_specialize=["count", "tokens"])
def attention_key_gradient_hopper(
    q, k, v, d_out, lse2, delta, dk, dv, segments, count, tokens, c, scale, q_row_stride, q_head_stride, k_row_stride, k_head_stride,
    v_row_stride, v_head_stride, d_out_row_stride, d_out_head_stride, sum_row_stride, sum_head_stride,
    GROUP: gl.constexpr, BLOCK: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """dk and dv [rows, KV heads, 128] of one block of 128 keys of one segment and one KV head. Grid: (blocks, KV heads)."""
    kv_head = gl.program_id(1)
    kv_heads = gl.num_programs(1)
    segment, offset = find_block(segments, count, gl.program_id(0), KIND, 2 * HALF)
    row, rows, position, other, length = describe(segments, segments, tokens, segment, KIND)
    if offset >= rows:
        return
    low = (position + offset) // 16 * 16
    q += kv_head * GROUP * q_head_stride + other.to(gl.int64) * q_row_stride
    d_out += kv_head * GROUP * d_out_head_stride + other.to(gl.int64) * d_out_row_stride
    lse2 += kv_head * GROUP * sum_head_stride + other.to(gl.int64) * sum_row_stride
    delta += kv_head * GROUP * sum_head_stride + other.to(gl.int64) * sum_row_stride
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0])
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, DIM], swizzled)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, DIM], swizzled)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, DIM], swizzled)
    o_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK, DIM], swizzled)
    l_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], flat)
    d_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK], flat)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=128)
        mbarrier.init(free.index(i), count=2)
    ring = (q_tiles, o_tiles, l_tiles, d_tiles, ready, free)
    gl.warp_specialize(
        [
            (load_queries, (
                q, d_out, lse2, delta, q_row_stride, q_head_stride, d_out_row_stride, d_out_head_stride, sum_row_stride, sum_head_stride,
                low, length, ring, GROUP, BLOCK, STAGES,
            )),
            (add_queries, (
                k, v, dk, dv, c, scale, row, rows, position, offset, kv_head, kv_heads, k_row_stride, k_head_stride, v_row_stride,
                v_head_stride, low, length, k_tiles.index(0), v_tiles.index(0), ring, 0, GROUP, BLOCK, STAGES,
            )),
            (add_queries, (
                k, v, dk, dv, c, scale, row, rows, position, offset, kv_head, kv_heads, k_row_stride, k_head_stride, v_row_stride,
                v_head_stride, low, length, k_tiles.index(1), v_tiles.index(1), ring, 1, GROUP, BLOCK, STAGES,
            )),
        ],
        [4, 4],
        [224, 224],
    )  # fmt: skip
