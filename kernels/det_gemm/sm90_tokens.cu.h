// Weight gradients in token order for Hopper: out[rows, columns] = sum over tokens of a[token, row] * b[token, column], fp32.
//
// A stage holds 32 tokens, two groups of 16, read in place: the tensor copy engine copies runs of rows that lie one after the other; a token
// that is missing (fill) is a row past the last, which reads as +0. `schedule` writes the runs once, for all blocks. A leaf restarts the
// accumulator. Finished leaves and pairs of leaves wait in registers, the first four leaves in shared memory; from there a finished tile is
// copied to the output while the next one is computed.
//
// Two blocks of a cluster, neighbours along the rows, share b: each copies every other step of it for both.

#include "sm90.h"
#include "sm90_cluster.h"
#include "wgmma.h"  // generated: multiply(acc, a, b, keep) for COLUMNS

constexpr int COLUMNS = 128, STAGES = 10, CLUSTER = 2, LEAVES = 8;
constexpr int DEPTH = 32, GROUP = 16, PIECE = DEPTH * LINE;  // a piece: 64 values of 32 tokens, swizzled over 128 bytes
constexpr int CONSUMERS = 2, ROWS = 64 * CONSUMERS, FLOATS = COLUMNS / 2, QUADS = FLOATS / 4;
constexpr int WORKERS = 128 * CONSUMERS, THREADS = WORKERS + 128;
constexpr int A_PIECES = ROWS / 64, B_PIECES = COLUMNS / 64, STAGE = (A_PIECES + B_PIECES) * PIECE;
using Tiles = Grid<CLUSTER * ROWS, COLUMNS>;
constexpr int LEVELS = 6;
constexpr int DESK = 4 * FLOATS * 128;                       // of a warpgroup
constexpr int BOX_COLUMNS = 32, BOX = 64 * 4 * BOX_COLUMNS;  // of the output: a warpgroup's rows, lines swizzled over 128 bytes

struct Maps { TensorMap level[LEVELS]; };  // boxes of 1, 2, 4 … tokens of a chunk, 32 tokens of all chunks

struct Problem {
    int2* copies;  // per step and lane: first token of a run and log2 of its length, or −1; its place is the lane's
    const long long *index, *offsets;  // index: null if row i is the token at place i of the leaves
    int rows, columns, tokens;
    __device__ __forceinline__ int steps(int leaf) const {
        return max(1, int(offsets[leaf + 1] - offsets[leaf] + DEPTH - 1) / DEPTH);  // an empty leaf is a step of fill
    }
    __device__ __forceinline__ int tiles() const { return Tiles::count(rows, columns); }
    __device__ __forceinline__ void place(int tile, u32 rank, int& row, int& column) const {  // of this block
        Tiles::place(tile, rows, columns, row, column);
        row += rank * ROWS;
    }
};

// A warp per step: the largest aligned blocks of tokens that lie one after the other.
extern "C" __global__ void schedule(const Problem p) {
    const int step = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    int leaf = 0, edge = 0;
    while (leaf < LEAVES && step >= edge + p.steps(leaf)) edge += p.steps(leaf++);
    if (leaf == LEAVES) return;
    const long long at = p.offsets[leaf] + (step - edge) * DEPTH + lane;
    const long long token = at >= p.offsets[leaf + 1] ? -1 : p.index ? p.index[at] : at;
    const int here = token < 0 ? p.tokens : int(token), next = __shfl_down_sync(~0u, here, 1);
    const u32 follows = __ballot_sync(~0u, next == (here == p.tokens ? here : here + 1));
    int level = 0;
#pragma unroll
    for (int l = 1; l < LEVELS; ++l) {
        const u32 inner = (1u << ((1 << l) - 1)) - 1;
        if (((follows >> (lane >> l << l)) & inner) == inner) level = l;
    }
    p.copies[step * DEPTH + lane] = make_int2(here, lane & ((1 << level) - 1) ? -1 : level);
}

// One operand of a run into its place in a stage: a whole step at once, chunk by chunk of a shorter run.
template <bool BOTH, int PIECES> __device__ __forceinline__ void copy_run(const Maps& maps, int2 run, u32 to, u32 barrier, int value) {
    const TensorMap& map = maps.level[run.y];
    if (run.y == LEVELS - 1) copy_to<BOTH>(map, to, barrier, 0, run.x, value / 64);
    else
#pragma unroll
        for (int c = 0; c < PIECES; ++c) copy_to<BOTH>(map, to + c * PIECE, barrier, value + 64 * c, run.x);
}

// The matrix instruction's view of an operand that lies [token, value] in chunks of 64 values, in swizzled lines of 128 bytes.
__device__ __forceinline__ u64 token_view(u32 shared) {
    return (1ull << 62) | (64ull << 32) | (u64(PIECE >> 4) << 16) | u64((shared & 0x3FFFF) >> 4);
}

// A leaf: the accumulator from +0, `steps` stages of the ring in order. A stage is given back once the products that read it are done.
__device__ __forceinline__ void accumulate(float (&acc)[FLOATS], Ring<STAGES>& ring, int steps, u32 start, u32 full, int group, int lane) {
    u32 before = 0;
    pin(acc);
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.next(1)) {
        barrier_wait(full + 8 * ring.stage, ring.phase);
        const u32 at = start + ring.stage * STAGE;
        const u64 x = token_view(at + group * PIECE), y = token_view(at + A_PIECES * PIECE);
        products_begin();
#pragma unroll
        for (int g = 0; g < DEPTH / GROUP; ++g) multiply(acc, x + g * (GROUP * LINE >> 4), y + g * (GROUP * LINE >> 4), step | g);
        products_end();
        await_products<1>();
        if (step && lane < CLUSTER) barrier_arrive_at(before, lane);
        before = full + 8 * (STAGES + ring.stage);
    }
    await_products<0>();
    pin(acc);
    if (lane < CLUSTER) barrier_arrive_at(before, lane);
}

// What a warpgroup's threads put down in its part of shared memory, and the copy from there to the output.
struct Desk {
    u32 at;  // shared memory of this warpgroup
    int thread, group;

    __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory"); }

    // Nothing is copied from here any more.
    __device__ __forceinline__ void await_copies() const {
        if (thread == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        sync();
    }

    __device__ __forceinline__ void put(const float (&acc)[FLOATS]) const {
#pragma unroll
        for (int i = 0; i < QUADS; ++i)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at + 16 * (i * 128 + thread)), "f"(acc[4 * i]), "f"(acc[4 * i + 1]),
                         "f"(acc[4 * i + 2]), "f"(acc[4 * i + 3]) : "memory");
    }

    __device__ __forceinline__ void join(float (&acc)[FLOATS]) const {
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            float4 v;
            asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                         : "r"(at + 16 * (i * 128 + thread)) : "memory");
            acc[4 * i] = v.x + acc[4 * i], acc[4 * i + 1] = v.y + acc[4 * i + 1];
            acc[4 * i + 2] = v.z + acc[4 * i + 2], acc[4 * i + 3] = v.w + acc[4 * i + 3];
        }
    }

    // A tile to the output from `row` and `column` on; what lies outside is left out. Every NaN as the quiet one.
    // value[4j … 4j+3] = (row, 2 columns), (row + 8, 2 columns) of group j of 8 columns.
    __device__ __forceinline__ void store(const TensorMap& out, const float (&value)[FLOATS], int row, int column) const {
        sync();  // all have read
        const int lane = thread % 32, q = lane & 3, r = thread / 32 * 16 + lane / 4;
        const u32 line = at + r * LINE + (q & 1) * 8, chunk = ((q >> 1) ^ (r & 7)) << 4;
#pragma unroll
        for (int i = 0; i < FLOATS; i += 2) {
            const float x = value[i] == value[i] ? value[i] : __int_as_float(0x7FC00000);
            const float y = value[i + 1] == value[i + 1] ? value[i + 1] : __int_as_float(0x7FC00000);
            asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(line + (chunk ^ (i / 4 % 4 << 5)) + i / 16 * BOX + (i & 2 ? 8 * LINE : 0)),
                         "f"(x), "f"(y) : "memory");
        }
        shared_written();
        sync();
        if (thread == 0) {
#pragma unroll
            for (int c = 0; c < COLUMNS / BOX_COLUMNS; ++c)
                asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&out),
                             "r"(column + BOX_COLUMNS * c), "r"(row), "r"(at + c * BOX) : "memory");
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1) product(
    const __grid_constant__ Maps a, const __grid_constant__ Maps b, const __grid_constant__ TensorMap out, const Problem p) {
    extern __shared__ unsigned char dynamic[];
    const u32 start = (address(dynamic) + 1023) & ~1023u;
    const u32 full = start + STAGES * STAGE + CONSUMERS * DESK, empty = full + 8 * STAGES;
    unsigned char* const base = dynamic + (start - address(dynamic));
    int* const leaf_steps = (int*)(base + STAGES * STAGE + CONSUMERS * DESK + 16 * STAGES);
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    const u32 rank = rank_in_cluster();
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;

    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4 * CONSUMERS * CLUSTER);
        }
        barriers_ready();
        shared_written();
    }
    if (threadIdx.x < LEAVES) leaf_steps[threadIdx.x] = p.steps(threadIdx.x);
    __syncthreads();
    cluster_sync();
    int steps = 0;
#pragma unroll
    for (int leaf = 0; leaf < LEAVES; ++leaf) steps += leaf_steps[leaf];

    if (group == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int warp = threadIdx.x % 128 / 32;  // the warps take turns: one alone issues copies too slowly
        const bool turn = u32(warp % 2) == rank;
        Ring<STAGES> ring(warp);
        int step = warp;
        for (int tile = cluster; tile < p.tiles(); tile += clusters, step -= steps) {
            int row, column;
            p.place(tile, rank, row, column);
            for (; step < steps; step += 4, ring.next(4)) {
                const u32 barrier = full + 8 * ring.stage, to = start + ring.stage * STAGE + lane * LINE;
                const int2 run = __ldg(p.copies + step * DEPTH + lane);
                barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
                if (lane == 0) barrier_expect(barrier, STAGE);
                __syncwarp();
                if (run.y >= 0) {
                    copy_run<false, A_PIECES>(a, run, to, barrier, row);
                    if (turn) copy_run<true, B_PIECES>(b, run, to + A_PIECES * PIECE, barrier, column);
                }
                __syncwarp();
            }
        }
        __syncwarp();
        cluster_sync();
        return;
    }

    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const Desk desk{start + STAGES * STAGE + group * DESK, int(threadIdx.x % 128), group};
    float acc[FLOATS], leaf_done[FLOATS], pair_done[FLOATS];
    Ring<STAGES> ring(0);
    for (int tile = cluster; tile < p.tiles(); tile += clusters) {
#pragma unroll 1
        for (int leaf = 0; leaf < LEAVES; leaf += 2) {
            accumulate(acc, ring, leaf_steps[leaf], start, full, group, lane);
#pragma unroll
            for (int i = 0; i < FLOATS; ++i) leaf_done[i] = acc[i];
            accumulate(acc, ring, leaf_steps[leaf + 1], start, full, group, lane);
#pragma unroll
            for (int i = 0; i < FLOATS; ++i) acc[i] = leaf_done[i] + acc[i];
            if (leaf & 2) {
#pragma unroll
                for (int i = 0; i < FLOATS; ++i) acc[i] = pair_done[i] + acc[i];
                if (leaf & 4) {
                    desk.join(acc);
                    int row, column;
                    p.place(tile, rank, row, column);
                    desk.store(out, acc, row + group * 64, column);
                } else {
                    desk.await_copies();
                    desk.put(acc);
                }
            } else {
#pragma unroll
                for (int i = 0; i < FLOATS; ++i) pair_done[i] = acc[i];
            }
        }
    }
    desk.await_copies();
    cluster_sync();
}
