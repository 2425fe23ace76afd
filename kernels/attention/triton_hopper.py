"""Attention's forward pass over packed keys for Hopper cards: warps that load, and two groups of warps that multiply in turn.

Same bytes as rlk.kernels.attention.triton_forward. A block of 128 states (positions times the query heads of a KV head) is halved between
two groups of four warps. Each starts the scores of the next tile before it waits for the values of the last, so that the exponentials of
one group run under the products of the other. The joined splits wait in shared memory.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    mma_v2,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rlk.kernels._triton.numerics import exp2, log2
from rlk.kernels.attention.triton_forward import MINUS_INFINITY, SEARCH, describe, finish, join

DIM = gl.constexpr(128)
# The later of two names of one function.
copy_to_shared = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
HALF = gl.constexpr(64)  # states of a group of warps


@gluon.jit
def find_block(segments, count, block, KIND: gl.constexpr, STEP: gl.constexpr):
    """As triton_forward.find_block, with a layout."""
    stride: gl.constexpr = 5 if KIND == 1 else 1
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    before = 0
    for base in range(0, count, SEARCH):
        i = base + gl.arange(0, SEARCH, layout=lanes)
        first = gl.load(segments + i * stride, mask=i < count, other=0).to(gl.int32)
        before += gl.sum(((i < count) & (first // STEP + i <= block)).to(gl.int32), 0)
    segment = before - 1
    first = gl.load(segments + segment * stride).to(gl.int32)
    return segment, (block - first // STEP - segment) * STEP


@gluon.jit
def load_keys(
    k, v, k_row_stride, v_row_stride, end, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, KV_TILE: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Copies the tiles of keys 0 … end-1 and their values into shared memory; keys beyond are +0."""
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    row = gl.arange(0, KV_TILE, layout=gl.SliceLayout(1, rows))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, rows))
    for tile in range(gl.cdiv(end, KV_TILE)):
        slot = tile % STAGES
        free = (tile // STAGES & 1) ^ 1
        key = tile * KV_TILE + row
        live = (key < end)[:, None] & (d < DIM)[None, :]
        mbarrier.wait(k_free.index(slot), free)
        copy_to_shared(k_tiles.index(slot), k + (key.to(gl.int64) * k_row_stride)[:, None] + d[None, :], mask=live)
        async_copy.mbarrier_arrive(k_ready.index(slot), increment_count=False)
        mbarrier.wait(v_free.index(slot), free)
        copy_to_shared(v_tiles.index(slot), v + (key.to(gl.int64) * v_row_stride)[:, None] + d[None, :], mask=live)
        async_copy.mbarrier_arrive(v_ready.index(slot), increment_count=False)


@gluon.jit
def softmax(scores, m, positions, key, c, MASKED: gl.constexpr):
    """(P in bf16, new maximum, α) of one tile."""
    t = scores * c
    if MASKED:
        t = gl.where(key[None, :] <= positions[:, None], t, MINUS_INFINITY)
    top = gl.maximum(m, gl.max(t, 1))
    base = gl.where(top == MINUS_INFINITY, 0.0, top)
    return exp2(t - base[:, None]).to(gl.bfloat16), top, exp2(m - base)


@gluon.jit
def advance(
    m, s, o, p, total_m, total_s, tile, low, positions, column, ones, none, c, q_tile, o_tile, k_tiles, v_tiles, k_ready, v_ready, k_free,
    v_free, KV_TILE: gl.constexpr, KV_SPLIT: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores and P of the tile of keys from ``low`` on, while the values of the tile before it, whose P is ``p``, are taken into o."""
    o_layout: gl.constexpr = o.type.layout
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    s_layout: gl.constexpr = s.type.layout
    slot = tile % STAGES
    last = (tile - 1) % STAGES
    mbarrier.wait(v_ready.index(last), (tile - 1) // STAGES & 1)
    mbarrier.wait(k_ready.index(slot), tile // STAGES & 1)
    scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
    operand = gl.convert_layout(p, gl.DotOperandLayout(0, o_layout, 2))
    pending = warpgroup_mma(operand, v_tiles.index(last), o, is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_free.index(slot), count=1)
    before = m
    if KV_SPLIT > 0:
        before = gl.where(low % KV_SPLIT == 0, MINUS_INFINITY, m)
    p, top, alpha = softmax(scores, before, positions, low + column, c, MASKED)
    o, operand = warpgroup_mma_wait(0, deps=[pending, operand])
    mbarrier.arrive(v_free.index(last), count=1)
    if KV_SPLIT > 0:  # noqa: SIM102 - known when compiled
        if low % KV_SPLIT == 0:
            sums = gl.convert_layout(gl.max(s, 1), o_rows)  # of equal columns
            part_m = gl.convert_layout(m, o_rows)
            if low == KV_SPLIT:
                total_m, total_s = part_m, sums
                o_tile.store(o)
            else:
                total_m, total_s, joined = join(total_m, total_s, o_tile.load(o_layout), part_m, sums, o)
                o_tile.store(joined)
            o = gl.zeros([HALF, DIM], gl.float32, layout=o_layout)
            s = gl.zeros([HALF, 8], gl.float32, layout=s_layout)
    s = mma_v2(
        gl.convert_layout(p, gl.DotOperandLayout(0, s_layout, 2)), ones, s * gl.convert_layout(alpha, gl.SliceLayout(1, s_layout))[:, None]
    )
    o = o * gl.convert_layout(alpha, o_rows)[:, None]
    return top, s, o, p, total_m, total_s


@gluon.jit
def attend(
    q_tile, o_tile, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, tile, low, plain, high, positions, c, KV_TILE: gl.constexpr,
    KV_SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """State over the tiles of keys low … high-1, at least one, the first of which is number ``tile`` in the ring of shared memory.

    plain: end of the tiles that every state sees whole. Returns m, s (equal columns) and o of the last split, m and s of the splits before
    it, joined, whose o is in o_tile, and the number of the next tile.
    """
    t_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    t_rows: gl.constexpr = gl.SliceLayout(1, t_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    column = gl.arange(0, KV_TILE, layout=gl.SliceLayout(0, t_layout))
    ones = gl.full([KV_TILE, 8], 1.0, gl.bfloat16, layout=gl.DotOperandLayout(1, s_layout, 2))
    none = gl.zeros([HALF, KV_TILE], gl.float32, layout=t_layout)
    s = gl.zeros([HALF, 8], gl.float32, layout=s_layout)
    o = gl.zeros([HALF, DIM], gl.float32, layout=o_layout)
    total_m = gl.full([HALF], MINUS_INFINITY, gl.float32, layout=o_rows)
    total_s = gl.zeros([HALF], gl.float32, layout=o_rows)
    mbarrier.wait(k_ready.index(tile % STAGES), tile // STAGES & 1)
    scores = warpgroup_mma(q_tile, k_tiles.index(tile % STAGES).permute((1, 0)), none, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(k_free.index(tile % STAGES), count=1)
    p, m, _ = softmax(scores, gl.full([HALF], MINUS_INFINITY, gl.float32, layout=t_rows), positions, low + column, c, True)
    s = mma_v2(gl.convert_layout(p, gl.DotOperandLayout(0, s_layout, 2)), ones, s)
    tile += 1
    for start in range(low + KV_TILE, plain, KV_TILE):
        m, s, o, p, total_m, total_s = advance(
            m, s, o, p, total_m, total_s, tile, start, positions, column, ones, none, c, q_tile, o_tile, k_tiles, v_tiles, k_ready, v_ready,
            k_free, v_free, KV_TILE, KV_SPLIT, STAGES, False,
        )  # fmt: skip
        tile += 1
    for start in range(gl.maximum(low + KV_TILE, plain), high, KV_TILE):
        m, s, o, p, total_m, total_s = advance(
            m, s, o, p, total_m, total_s, tile, start, positions, column, ones, none, c, q_tile, o_tile, k_tiles, v_tiles, k_ready, v_ready,
            k_free, v_free, KV_TILE, KV_SPLIT, STAGES, True,
        )  # fmt: skip
        tile += 1
    last = tile - 1
    mbarrier.wait(v_ready.index(last % STAGES), last // STAGES & 1)
    operand = gl.convert_layout(p, gl.DotOperandLayout(0, o_layout, 2))
    pending = warpgroup_mma(operand, v_tiles.index(last % STAGES), o, is_async=True)
    o, operand = warpgroup_mma_wait(0, deps=[pending, operand])
    mbarrier.arrive(v_free.index(last % STAGES), count=1)
    return gl.convert_layout(m, o_rows), gl.convert_layout(gl.max(s, 1), o_rows), o, total_m, total_s, tile


@gluon.jit
def multiply(
    q, out, lse2, row, rows, offset, position, kv_head, heads, end, plain, c, q_row_stride, q_head_stride, q_tile, o_tile, k_tiles, v_tiles,
    k_ready, v_ready, k_free, v_free, HALF_OF: gl.constexpr, GROUP: gl.constexpr, KV_TILE: gl.constexpr, KV_SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The states HALF_OF·64 … HALF_OF·64 + 63 of a block, over all its tiles."""
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    t_rows: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KV_TILE, 16]))
    # The queries, 16 bytes a thread, into shared memory.
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, wide))
    state = HALF_OF * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, wide))
    at = (row + offset + state // GROUP).to(gl.int64)
    head = kv_head * GROUP + state % GROUP
    real = (offset + state // GROUP < rows)[:, None] & (d < DIM)[None, :]
    q_tile.store(gl.load(q + (at * q_row_stride + head * q_head_stride)[:, None] + d[None, :], mask=real, other=0.0))
    fence_async_shared()
    positions = position + offset + (HALF_OF * HALF + gl.arange(0, HALF, layout=t_rows)) // GROUP
    m, sums, o, total_m, total_s, _ = attend(
        q_tile, o_tile, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, 0, 0, plain, end, positions, c, KV_TILE, KV_SPLIT, STAGES
    )
    if KV_SPLIT > 0:  # noqa: SIM102 - known when compiled
        if end > KV_SPLIT:
            m, sums, o = join(total_m, total_s, o_tile.load(o_layout), m, sums, o)
    # Out through the memory of the queries, 16 bytes a thread.
    q_tile.store(finish(sums, o))
    gl.store(out + (at * heads + head)[:, None] * DIM + d[None, :], q_tile.load(wide), mask=real)
    state = HALF_OF * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, o_layout))
    at = (row + offset + state // GROUP).to(gl.int64)
    gl.store(lse2 + at * heads + kv_head * GROUP + state % GROUP, m + log2(sums), mask=offset + state // GROUP < rows)


@gluon.jit(do_not_specialize=["count", "tokens"])
def attention_forward_hopper(
    q, k, v, out, lse2, segments, count, tokens, c, q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride,
    GROUP: gl.constexpr, KV_TILE: gl.constexpr, KV_SPLIT: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """out [rows, heads, 128] and lse2 [rows, heads] of one block of positions of one segment and one KV head. Grid: (blocks, KV heads)."""
    STEP: gl.constexpr = 128 // GROUP
    kv_head = gl.program_id(1)
    heads = gl.num_programs(1) * GROUP
    block = gl.num_programs(0) - 1 - gl.program_id(0)  # the longest rows of a sequence first
    segment, offset = find_block(segments, count, block, KIND, STEP)
    row, rows, position, other, _ = describe(segments, segments, tokens, segment, KIND)
    if offset >= rows:
        return
    k += kv_head * k_head_stride + other.to(gl.int64) * k_row_stride
    v += kv_head * v_head_stride + other.to(gl.int64) * v_row_stride
    end = position + gl.minimum(offset + STEP, rows)
    plain = (position + offset + 1) // KV_TILE * KV_TILE
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KV_TILE, DIM], swizzled)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KV_TILE, DIM], swizzled)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, DIM], swizzled)
    waiting: gl.constexpr = gl.SwizzledSharedLayout(vec=4, per_phase=1, max_phase=8, order=[1, 0])
    o_tiles = gl.allocate_shared_memory(gl.float32, [2, HALF if KV_SPLIT > 0 else 1, DIM], waiting)
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=128)
        mbarrier.init(v_ready.index(i), count=128)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    gl.warp_specialize(
        [
            (load_keys, (k, v, k_row_stride, v_row_stride, end, k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, KV_TILE, STAGES)),
            (multiply, (
                q, out, lse2, row, rows, offset, position, kv_head, heads, end, plain, c, q_row_stride, q_head_stride, q_tiles.index(0),
                o_tiles.index(0), k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, 0, GROUP, KV_TILE, KV_SPLIT, STAGES,
            )),
            (multiply, (
                q, out, lse2, row, rows, offset, position, kv_head, heads, end, plain, c, q_row_stride, q_head_stride, q_tiles.index(1),
                o_tiles.index(1), k_tiles, v_tiles, k_ready, v_ready, k_free, v_free, 1, GROUP, KV_TILE, KV_SPLIT, STAGES,
            )),
        ],
        [4, 4],
        [224, 224],
    )  # fmt: skip
