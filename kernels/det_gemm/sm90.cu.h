// Matrix products in the contract's order for Hopper: copies by the tensor copy engine, warpgroup matrix instructions, leaves joined by the
// tree of adjacent pairs without leaving the launch.
//
// A block holds one producer and CONSUMERS warpgroups of 64 output rows each. A leaf restarts the accumulator; its steps are DEPTH deep,
// groups of 16, ascending. Finished subtrees wait, per level of the tree, in registers (KEEPn floats of each thread) and in shared memory.
// With GROUPS > 1 a cluster of blocks divides the leaves of one output tile, and the blocks join their subtrees through each other's shared
// memory. With PAIR two blocks of a cluster share an operand: each copies half of it for both. None of this changes the sequence of
// additions of an element.
//
// Compiled with: CONSUMERS (1 or 2), COLUMNS, LINES (of 64 values: the depth of a stage), STAGES, GROUPS, PAIR (0, 'a', 'b'), ACROSS (b lies
// [depth, columns] instead of [columns, depth]), FLOAT_OUT, LEVELS of the tree that a block joins (0 to 3), KEEP0, KEEP1, KEEP2.

#include "sm90.h"
#include "sm90_cluster.h"
#include "wgmma.h"  // generated: multiply(acc, a, b, keep) for COLUMNS

constexpr int DEPTH = 64 * LINES, GROUP = 16;
constexpr int ROWS = 64 * CONSUMERS, FLOATS = COLUMNS / 2, QUADS = FLOATS / 4;
constexpr int WORKERS = 128 * CONSUMERS, THREADS = WORKERS + 128;
constexpr int B_CHUNKS = (COLUMNS + 63) / 64;
constexpr int A_LINE = ROWS * LINE, B_LINE = COLUMNS * LINE;
constexpr int A_BYTES = LINES * A_LINE, B_BYTES = ACROSS ? B_CHUNKS * CHUNK : LINES * B_LINE;
static_assert(!ACROSS || LINES == 1, "chunks of b are 64 deep");
constexpr int SHARED0 = LEVELS > 0 ? FLOATS - KEEP0 : 0, SHARED1 = LEVELS > 1 ? FLOATS - KEEP1 : 0, SHARED2 = LEVELS > 2 ? FLOATS - KEEP2 : 0;
constexpr int CLUSTER = PAIR ? 2 : GROUPS;
constexpr int TILE_ROWS = PAIR == 'b' ? 2 * ROWS : ROWS, TILE_COLUMNS = PAIR == 'a' ? 2 * COLUMNS : COLUMNS;  // of a cluster
using Tiles = Grid<TILE_ROWS, TILE_COLUMNS>;

// A stage goes back to whoever copies into it: both blocks of a pair.
__device__ __forceinline__ void give_back(u32 barrier, int lane) {
    if (PAIR) {
        if (lane < 2) barrier_arrive_at(barrier, lane);
    } else if (lane == 0) barrier_arrive(barrier);
}

__device__ __forceinline__ float4 peer_load(u32 p) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(p) : "memory");
    return v;
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Where a finished subtree waits for its sibling: KEEP floats in registers, the others in shared memory.
template <int KEEP> struct Desk {
    float kept[KEEP ? KEEP : 1];
    float4* shared;

    __device__ __forceinline__ void put(const float (&acc)[FLOATS]) {
#pragma unroll
        for (int i = 0; i < KEEP; ++i) kept[i] = acc[i];
#pragma unroll
        for (int i = KEEP / 4; i < QUADS; ++i)
            shared[(i - KEEP / 4) * WORKERS] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
    }

    __device__ __forceinline__ void join(float (&acc)[FLOATS]) const {
#pragma unroll
        for (int i = 0; i < KEEP; ++i) acc[i] = kept[i] + acc[i];
#pragma unroll
        for (int i = KEEP / 4; i < QUADS; ++i) {
            const float4 v = shared[(i - KEEP / 4) * WORKERS];
            acc[4 * i] = v.x + acc[4 * i];
            acc[4 * i + 1] = v.y + acc[4 * i + 1];
            acc[4 * i + 2] = v.z + acc[4 * i + 2];
            acc[4 * i + 3] = v.w + acc[4 * i + 3];
        }
    }
};

__device__ __forceinline__ float quiet(float v) { return v == v ? v : __int_as_float(0x7FC00000); }

// COUNT groups of 8 columns up to `end`, from this thread's share: value[4j … 4j+3] = (row, 2 columns), (row + 8, 2 columns) of group j.
template <int COUNT>
__device__ __forceinline__ void store(void* out, const float* value, int row, int column, int rows, int columns, int end, int lane) {
    const int q = lane & 3;
#if FLOAT_OUT
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        const int at = column + 8 * j + 2 * q;
        if (at >= end) continue;
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (row + 8 * h < rows)
                *(float2*)((float*)out + (long long)(row + 8 * h) * columns + at) =
                    make_float2(quiet(value[4 * j + 2 * h]), quiet(value[4 * j + 2 * h + 1]));
    }
#else
    constexpr int WHOLE = COUNT / 4 * 4;
#pragma unroll
    for (int j = 0; j < WHOLE; j += 4)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            u32 v[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) v[i] = rounded(value[4 * (j + i) + 2 * h], value[4 * (j + i) + 2 * h + 1]);
            transpose(v, lane);
            const int at = column + 8 * (j + q);
            if (row + 8 * h < rows && at < end)
                *(uint4*)((unsigned short*)out + (long long)(row + 8 * h) * columns + at) = make_uint4(v[0], v[1], v[2], v[3]);
        }
#pragma unroll
    for (int j = WHOLE; j < COUNT; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int at = column + 8 * j + 2 * q;
            if (row + 8 * h < rows && at < end)
                *(u32*)((unsigned short*)out + (long long)(row + 8 * h) * columns + at) =
                    rounded(value[4 * j + 2 * h], value[4 * j + 2 * h + 1]);
        }
#endif
}

// Pair tree over the blocks of a cluster for one quad of a thread's floats.
template <int COUNT> __device__ __forceinline__ float4 joined(u32 shared, int first) {
    if constexpr (COUNT == 1) return peer_load(at_rank(shared, first));
    else return plus(joined<COUNT / 2>(shared, first), joined<COUNT / 2>(shared, first + COUNT / 2));
}

struct Problem {
    void* out;
    int rows, columns, depth, leaves, bytes;  // depth of a leaf; leaves of this block; bytes that fill a stage
    __device__ __forceinline__ int steps() const { return (depth + DEPTH - 1) / DEPTH; }
    __device__ __forceinline__ int tiles() const { return Tiles::count(rows, columns); }
    // First row and column of this block's part of the cluster's tile.
    __device__ __forceinline__ void place(int tile, u32 rank, int& row, int& column) const {
        Tiles::place(tile, rows, columns, row, column);
        if (PAIR == 'b') row += rank * ROWS;
        if (PAIR == 'a') column += rank * COLUMNS;
    }
};

// One step of a into a stage; a shared operand is copied in halves, one by each block.
__device__ __forceinline__ void copy_a(const TensorMap& a, u32 to, u32 barrier, int row, int k, u32 rank) {
    constexpr bool BOTH = PAIR == 'a';
#pragma unroll
    for (int l = 0; l < LINES; ++l, to += A_LINE, k += 64)
        copy_to<BOTH>(a, to + (BOTH ? rank * (A_LINE / 2) : 0), barrier, k, row + (BOTH ? rank * (ROWS / 2) : 0));
}

// The same of b.
__device__ __forceinline__ void copy_b(const TensorMap& b, u32 to, u32 barrier, int column, int k, u32 rank) {
    constexpr bool BOTH = PAIR == 'b';
    u32 b_to = to + A_BYTES;
    if (ACROSS) {
#pragma unroll
        for (int c = 0; c < B_CHUNKS / (BOTH ? 2 : 1); ++c) {
            const int chunk = (BOTH ? rank * (B_CHUNKS / 2) : 0) + c;
            copy_to<BOTH>(b, b_to + chunk * CHUNK, barrier, column + 64 * chunk, k);
        }
    } else {
#pragma unroll
        for (int l = 0; l < LINES; ++l, b_to += B_LINE, k += 64)
            copy_to<BOTH>(b, b_to + (BOTH ? rank * (B_LINE / 2) : 0), barrier, k, column + (BOTH ? rank * (COLUMNS / 2) : 0));
    }
}

// A leaf: the accumulator from +0, `steps` stages of the ring in order. A stage is given back once the products that read it are done.
__device__ __forceinline__ void accumulate(
    float (&acc)[FLOATS], Ring<STAGES>& ring, int steps, u32 start, u32 empty, int group, int lane) {
    const u32 full = empty - 8 * STAGES;
    u32 before = 0;
    pin(acc);
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.next(1)) {
        barrier_wait(full + 8 * ring.stage, ring.phase);
        const u32 a_at = start + ring.stage * (A_BYTES + B_BYTES), b_at = a_at + A_BYTES;
        const u64 x = descriptor(a_at + group * CHUNK, false), y = descriptor(b_at, ACROSS);
        products_begin();
#pragma unroll
        for (int g = 0; g < DEPTH / GROUP; ++g)
            multiply(
                acc, x + g / 4 * (A_LINE >> 4) + g % 4 * 2,
                y + (ACROSS ? g * (GROUP * LINE >> 4) : g / 4 * (B_LINE >> 4) + g % 4 * 2), step | g);
        products_end();
        await_products<1>();
        if (step) give_back(before, lane);
        before = empty + 8 * ring.stage;
    }
    await_products<0>();
    pin(acc);
    if (steps) give_back(before, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) __cluster_dims__(CLUSTER, 1, 1) product(
    const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b, const Problem p) {
    extern __shared__ unsigned char dynamic[];
    const u32 start = (address(dynamic) + 1023) & ~1023u;
    unsigned char* const base = dynamic + (start - address(dynamic));
    const u32 full = start + STAGES * (A_BYTES + B_BYTES) + 4 * WORKERS * (SHARED0 + SHARED1 + SHARED2), empty = full + 8 * STAGES;
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    const u32 rank = CLUSTER > 1 ? rank_in_cluster() : 0;
    const int cluster = blockIdx.x / CLUSTER, clusters = gridDim.x / CLUSTER;
    const int first_leaf = GROUPS > 1 ? rank * p.leaves : 0;

    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(full + 8 * s, 1);
            barrier_init(empty + 8 * s, 4 * CONSUMERS * (PAIR ? 2 : 1));
        }
        barriers_ready();
        shared_written();
    }
    __syncthreads();
    if (CLUSTER > 1) cluster_sync();

    if (group == CONSUMERS) {
#if CONSUMERS > 1
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
        if (threadIdx.x == WORKERS) {
            // Where launches overlap no launch before this one writes b, the weights: what the ring holds of it is asked for at once.
            const int steps = p.steps();
            int early = 0;
            if (cluster < p.tiles()) {
                int row, column;
                p.place(cluster, rank, row, column);
                for (; early < min(STAGES, p.leaves * steps); ++early) {
                    const u32 barrier = full + 8 * early;
                    barrier_expect(barrier, p.bytes);
                    const int k = (first_leaf + early / steps) * p.depth + early % steps * DEPTH;
                    copy_b(b, start + early * (A_BYTES + B_BYTES), barrier, column, k, rank);
                }
            }
            asm volatile("griddepcontrol.wait;" ::: "memory");
            Ring<STAGES> ring(0);
            for (int tile = cluster; tile < p.tiles(); tile += clusters) {
                int row, column;
                p.place(tile, rank, row, column);
                for (int leaf = first_leaf; leaf < first_leaf + p.leaves; ++leaf) {
                    for (int step = 0; step < steps; ++step, ring.next(1), --early) {
                        const u32 barrier = full + 8 * ring.stage, to = start + ring.stage * (A_BYTES + B_BYTES);
                        const int k = leaf * p.depth + step * DEPTH;
                        if (early <= 0) {
                            barrier_wait(empty + 8 * ring.stage, ring.phase ^ 1);
                            barrier_expect(barrier, p.bytes);
                            copy_b(b, to, barrier, column, k, rank);
                        }
                        copy_a(a, to, barrier, row, k, rank);
                    }
                }
            }
        }
        __syncwarp();
        if (CLUSTER > 1) cluster_sync();
        if (GROUPS > 1) cluster_sync();
        return;
    }

#if CONSUMERS > 1
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
#endif
    float4* const shared = (float4*)(base + STAGES * (A_BYTES + B_BYTES)) + threadIdx.x;
    float acc[FLOATS];
    Desk<KEEP0> leaves{{}, shared};
    Desk<KEEP1> pairs{{}, leaves.shared + SHARED0 / 4 * WORKERS};
    Desk<KEEP2> fours{{}, pairs.shared + SHARED1 / 4 * WORKERS};
    Ring<STAGES> ring(0);
    for (int tile = cluster; tile < p.tiles(); tile += clusters) {
        int row, column;
        p.place(tile, rank, row, column);
        row += group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
#if LEVELS
        for (int leaf = 0; leaf < p.leaves; leaf += 2) {
            accumulate(acc, ring, p.steps(), start, empty, group, lane);
            leaves.put(acc);
            accumulate(acc, ring, p.steps(), start, empty, group, lane);
            leaves.join(acc);
            const bool last = leaf + 2 == p.leaves;
            if (leaf & 2) {
                pairs.join(acc);
                if (leaf & 4) fours.join(acc);
                else if (!last) fours.put(acc);
            } else if (!last) pairs.put(acc);
        }
#else
        accumulate(acc, ring, p.steps(), start, empty, group, lane);
#endif
        if (GROUPS == 1) {
            store<COLUMNS / 8>(p.out, acc, row, column, p.rows, p.columns, p.columns, lane);
        } else {
            constexpr int SHARE = (QUADS + GROUPS - 1) / GROUPS;
            asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory");  // the stages are read
            float4* const mine = (float4*)base + threadIdx.x;
#pragma unroll
            for (int i = 0; i < QUADS; ++i) mine[i * WORKERS] = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
            cluster_sync();
            float sum[4 * SHARE];
#pragma unroll
            for (int i = 0; i < SHARE; ++i) {
                const int quad = min(rank * SHARE + i, QUADS - 1);
                const float4 v = joined<GROUPS>(address(mine) + quad * WORKERS * 16, 0);
                sum[4 * i] = v.x, sum[4 * i + 1] = v.y, sum[4 * i + 2] = v.z, sum[4 * i + 3] = v.w;
            }
            store<SHARE>(p.out, sum, row, column + 8 * SHARE * rank, p.rows, p.columns, min(p.columns, column + COLUMNS), lane);
        }
    }
    if (CLUSTER > 1) cluster_sync();
}
