// What the attention kernels for Hopper share: blocks of work of packed sequences, their loads, exponentials and results.
//
// Of a block's three warpgroups two own 64 rows each and multiply; one warp of the third finds the next piece of work and copies. Rows are
// 128 wide. Compiled with: GROUP (query heads of a KV head, a power of two), STAGES (of the rings of tiles).

#include "sm90.h"
#include "wgmma.h"  // generated: the matrix instructions that a source names

constexpr int TILE = 64, DIM = 128, STEP = 128 / GROUP, THREADS = 384, WARPS = 8;  // STEP: positions of 128 states; WARPS: that multiply

// Fewer registers for the warp that copies, more for those that multiply.
__device__ __forceinline__ void copies() { asm volatile("setmaxnreg.dec.sync.aligned.u32 24;"); }
__device__ __forceinline__ void multiplies() { asm volatile("setmaxnreg.inc.sync.aligned.u32 240;"); }

struct Ring {  // position in a ring of stages
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

struct Queue {
    const long long* segments;  // as triton_forward.describe reads them: [count + 1] offsets, or [count, 5] where ranks own parts
    u32* taken;                 // pieces of work and blocks that are done; 0 and 0 between launches
    int count, owned, tokens, kv_heads, blocks, heads_first;
};

// first: row of position 0 on the other side, length: rows of the sequence there; row, rows, position: of the block's own first row, how
// many rows the sequence has from there on, its position; tiles: of the other side, 0 if no work is left.
struct Work {
    int row, rows, position, first, length, kv_head, tiles;
};

// The next piece of work of OWN positions; false if none is left. LATE: the last rows of a sequence first. All lanes of a warp take part.
template <int OWN, bool LATE> __device__ bool take(const Queue& queue, int lane, Work& w) {
    for (;;) {
        int item;
        if (lane == 0) item = atomicAdd(queue.taken, 1);
        item = __shfl_sync(~0u, item, 0);
        if (item >= queue.blocks * queue.kv_heads) return false;
        const int turn = queue.heads_first ? item / queue.kv_heads : item % queue.blocks;
        w.kv_head = queue.heads_first ? item % queue.kv_heads : item / queue.blocks;
        const int block = LATE ? queue.blocks - 1 - turn : turn, stride = queue.owned ? 5 : 1;
        int before = 0;
        for (int base = 0; base < queue.count; base += 32) {
            const int i = base + lane;
            const int found = __popc(__ballot_sync(~0u, i < queue.count && (int)queue.segments[i * stride] / OWN + i <= block));
            before += found;
            if (found < 32) break;
        }
        before = max(before, 1);
        const long long* const at = queue.segments + (before - 1) * stride;
        const int row = max((int)at[0], 0), offset = (block - (int)at[0] / OWN - (before - 1)) * OWN;
        const int rows = queue.owned ? (int)at[1] : min((int)at[1], queue.tokens) - row;
        if (offset < 0 || offset >= rows) continue;  // offsets that nothing has checked name no row outside
        w.row = row + offset, w.rows = rows - offset;
        w.position = queue.owned ? (int)at[2] + offset : offset;
        w.first = queue.owned ? (int)at[3] : row;
        w.length = queue.owned ? (int)at[4] : rows;
        return true;
    }
}

__device__ __forceinline__ void tell(Work* to, const Work& w) {
    volatile Work* const told = to;
    told->row = w.row, told->rows = w.rows, told->position = w.position, told->kv_head = w.kv_head, told->tiles = w.tiles;
}

// After the last piece of work: `barrier` tells the others, and the last block of the grid leaves the queue as it was found.
__device__ __forceinline__ void leave(const Queue& queue, Work* told, u32 barrier) {
    ((volatile Work*)told)->tiles = 0;
    barrier_arrive(barrier);
    __threadfence();
    if (atomicAdd(queue.taken + 1, 1) == gridDim.x - 1) {
        queue.taken[0] = 0, queue.taken[1] = 0;
        __threadfence();
    }
}

// This thread holds what it needs of shared memory, which the copy engine may overwrite once all have said so.
__device__ __forceinline__ void held(u32 barrier) {
    shared_written();
    barrier_arrive(barrier);
}

struct Matrix {  // bf16 rows in memory
    const unsigned short* data;
    long long row_stride;
    int head_stride;
};

// 64 rows of one head from `row` on, of which `rows` belong to the sequence: behind them is +0, whatever lies there. One arrival of
// lane 0 at the barrier.
__device__ __forceinline__ void load_rows(const TensorMap& map, const Matrix& x, int head, int row, int rows, u32 to, u32 barrier, int lane) {
    const int column = head * x.head_stride;
    if (rows < TILE) {
        const unsigned short* const corner = x.data + row * x.row_stride + column;
        const unsigned short* from = corner + lane / 16 * x.row_stride + lane % 16 * 8;
#pragma unroll 4
        for (int r = lane / 16; r < TILE; r += 2, from += 2 * x.row_stride)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + lane / 8 % 2 * CHUNK + r * LINE + ((lane % 8 ^ r % 8) << 4)),
                         "l"(r < rows ? from : corner), "r"(r < rows ? 16 : 0) : "memory");
        asm volatile("cp.async.wait_all;" ::: "memory");
        shared_written();
        __syncwarp();
        if (lane == 0) barrier_arrive(barrier);
    } else if (lane == 0) {
        barrier_expect(barrier, 2 * CHUNK);
        copy(map, to, barrier, column, row);
        copy(map, to + CHUNK, barrier, column + 64, row);
    }
    __syncwarp();
}

// 128 states, whose rows of one position are the heads of a group: 2 halves of 2 chunks. map: of [positions, heads, 128].
__device__ __forceinline__ void load_states(const TensorMap& map, const Work& w, u32 to, u32 barrier) {
#pragma unroll
    for (int part = 0; part < 4; ++part) copy(map, to + part * CHUNK, barrier, part % 2 * 64, w.kv_head * GROUP, w.row + part / 2 * (STEP / 2));
}

// s = a·bᵀ over 128 columns of 64 rows each; a in registers, so that the matrix unit reads half as much shared memory.
__device__ __forceinline__ void multiply(float (&s)[32], const u32 (&a)[32], u64 b) {
#pragma unroll
    for (int g = 0; g < DIM / 16; ++g)
        scores_held(s, a[4 * g], a[4 * g + 1], a[4 * g + 2], a[4 * g + 3], b + g / 4 * (CHUNK >> 4) + g % 4 * 2, g);
}

// x[i], of two rows in turns of two columns, is left out where its key is behind the row's position.
__device__ __forceinline__ void mask(float (&x)[32], int low, const int (&position)[2], int lane) {
    const int key = low + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; ++i)
        if (key + i / 4 * 8 + i % 2 > position[i / 2 % 2]) x[i] = MINUS_INFINITY;
}

// exp2 in place of values <= 0. least: bits, at least 0x80000000, of a value that is not above any of them.
__device__ __forceinline__ void exponentials(float (&x)[32], float least) {
    if (__any_sync(~0u, !(least >= -126.0f))) {
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] = exp2_kept(x[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 32; ++i) x[i] = exp2_normal(x[i]);
    }
}
