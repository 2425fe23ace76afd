// Matrix products in the contract's order for Hopper: copies by the tensor copy engine, warpgroup matrix instructions, leaves joined by the
// tree of adjacent pairs without leaving the launch.
//
// A block holds one producer and CONSUMERS warpgroups of 64 output rows each. A leaf restarts the accumulator; its steps are 64 deep, four
// groups of 16, ascending. Finished subtrees wait, per level of the tree, in registers (KEEPn floats of each thread), in shared memory
// (SHAREDn) and for the rest in the thread's own workspace in global memory. With GROUPS > 1 a cluster of blocks divides the leaves of one output tile, and the blocks join their subtrees through each
// other's shared memory. With PAIR two blocks of a cluster share an operand: each copies half of it for both. None of this changes the
// sequence of additions of an element.
//
// Compiled with: CONSUMERS (1 or 2), COLUMNS, STAGES, GROUPS, PAIR (0, 'a', 'b'), ACROSS (b lies [depth, columns] instead of
// [columns, depth]), FLOAT_OUT, KEEP0, SHARED0, KEEP1, SHARED1, KEEP2, SHARED2.

#include "wgmma.h"  // generated: multiply(acc, a, b, keep) for COLUMNS

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int DEPTH = 64, GROUP = 16, LINE = 128, CHUNK = DEPTH * LINE;  // a line: 64 values of bf16, swizzled over 128 bytes
constexpr int ROWS = 64 * CONSUMERS, FLOATS = COLUMNS / 2, QUADS = FLOATS / 4;
constexpr int WORKERS = 128 * CONSUMERS, THREADS = WORKERS + 128;
constexpr int B_CHUNKS = (COLUMNS + 63) / 64;
constexpr int A_BYTES = ROWS * LINE, B_BYTES = ACROSS ? B_CHUNKS * CHUNK : COLUMNS * LINE;
constexpr int CLUSTER = PAIR ? 2 : GROUPS;
constexpr int TILE_ROWS = PAIR == 'b' ? 2 * ROWS : ROWS, TILE_COLUMNS = PAIR == 'a' ? 2 * COLUMNS : COLUMNS;  // of a cluster
constexpr int BAND = TILE_ROWS >= 256 ? 8 : 16;

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 at_rank(u32 shared, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
    return there;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(barrier), "r"(phase) : "memory");
}

// Arrive at the barrier at this place in block `rank` of the pair. Only matrix instructions read what it guards, and they are done: the
// default scope is enough, and a cluster's would flush every write of the block.
__device__ __forceinline__ void barrier_arrive(u32 barrier, u32 rank) {
    if (!PAIR) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
    else asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(at_rank(barrier, rank)) : "memory");
}

__device__ __forceinline__ void copy(const TensorMap& map, u32 to, u32 barrier, int inner, int outer) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(inner), "r"(outer) : "memory");
}

// Into the same place of both blocks of the cluster.
__device__ __forceinline__ void copy_to_both(const TensorMap& map, u32 to, u32 barrier, int inner, int outer) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(
            to),
        "l"(&map), "r"(barrier), "r"(inner), "r"(outer), "h"((unsigned short)3) : "memory");
}

// The matrix instruction's view of an operand in 128-byte swizzled lines.
__device__ __forceinline__ u64 descriptor(u32 shared, bool across) {
    return (1ull << 62) | (64ull << 32) | ((across ? u64(CHUNK >> 4) : 1ull) << 16) | u64((shared & 0x3FFFF) >> 4);
}

// Keeps reads and writes of an accumulator on their side of the products.
__device__ __forceinline__ void pin(float (&acc)[FLOATS]) {
#pragma unroll
    for (int i = 0; i < FLOATS; ++i) asm volatile("" : "+f"(acc[i])::"memory");
}

template <int LEFT> __device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ float4 global_load(const float4* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void global_store(float4* p, float4 v) {
    asm volatile("st.global.cg.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ float4 peer_load(u32 p) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(p) : "memory");
    return v;
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Where a finished subtree waits for its sibling: KEEP floats in registers, SHARED in shared memory, the rest in global memory.
template <int KEEP, int SHARED> struct Desk {
    float kept[KEEP ? KEEP : 1];
    float4 *shared, *global;

    __device__ __forceinline__ void put(const float (&acc)[FLOATS]) {
#pragma unroll
        for (int i = 0; i < KEEP; ++i) kept[i] = acc[i];
#pragma unroll
        for (int i = KEEP / 4; i < QUADS; ++i) {
            const float4 v = make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]);
            if (4 * i < KEEP + SHARED) shared[(i - KEEP / 4) * WORKERS] = v;
            else global_store(global + i * WORKERS, v);
        }
    }

    __device__ __forceinline__ void join(float (&acc)[FLOATS]) const {
#pragma unroll
        for (int i = 0; i < KEEP; ++i) acc[i] = kept[i] + acc[i];
#pragma unroll
        for (int i = KEEP / 4; i < QUADS; ++i) {
            const float4 v = 4 * i < KEEP + SHARED ? shared[(i - KEEP / 4) * WORKERS] : global_load(global + i * WORKERS);
            acc[4 * i] = v.x + acc[4 * i];
            acc[4 * i + 1] = v.y + acc[4 * i + 1];
            acc[4 * i + 2] = v.z + acc[4 * i + 2];
            acc[4 * i + 3] = v.w + acc[4 * i + 3];
        }
    }
};

__device__ __forceinline__ float quiet(float v) { return v == v ? v : __int_as_float(0x7FC00000); }

// Two values rounded to nearest even, the first in the lower half; every NaN is the quiet one.
__device__ __forceinline__ u32 rounded(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    if (!(low == low)) both = (both & 0xFFFF0000u) | 0x7FC0u;
    if (!(high == high)) both = (both & 0x0000FFFFu) | 0x7FC00000u;
    return both;
}

// Four lanes hold the pieces 2q, 2q+1 of four groups of 8 columns; afterwards lane q holds group q whole.
__device__ __forceinline__ void transpose(u32 (&v)[4], int lane) {
    const bool upper = lane & 2, odd = lane & 1;
    u32 x = __shfl_xor_sync(~0u, upper ? v[0] : v[2], 2), y = __shfl_xor_sync(~0u, upper ? v[1] : v[3], 2);
    if (upper) v[0] = x, v[1] = y;
    else v[2] = x, v[3] = y;
    x = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1), y = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    if (odd) v[0] = x, v[2] = y;
    else v[1] = x, v[3] = y;
}

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

struct Ring {  // position in the ring of stages
    int stage = 0;
    u32 phase = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, phase ^= 1;
    }
};

struct Problem {
    void* out;
    float4* desks;
    int rows, columns, depth, leaves, bytes;  // depth of a leaf; leaves of this block; bytes that fill a stage
    __device__ __forceinline__ int steps() const { return (depth + DEPTH - 1) / DEPTH; }
    // First row and column of this block's part of the cluster's tile: bands of tiles, so that operands stay in the cache.
    __device__ __forceinline__ void place(int tile, u32 rank, int& row, int& column) const {
        const int down = (rows + TILE_ROWS - 1) / TILE_ROWS, across = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
        const int top = tile / (BAND * across) * BAND, height = min(down - top, BAND), inside = tile % (BAND * across);
        row = (top + inside % height) * TILE_ROWS + (PAIR == 'b' ? rank * ROWS : 0);
        column = inside / height * TILE_COLUMNS + (PAIR == 'a' ? rank * COLUMNS : 0);
    }
    __device__ __forceinline__ int tiles() const {
        return ((rows + TILE_ROWS - 1) / TILE_ROWS) * ((columns + TILE_COLUMNS - 1) / TILE_COLUMNS);
    }
};

// One step of a into a stage; a shared operand is copied in halves, one by each block.
__device__ __forceinline__ void copy_a(const TensorMap& a, u32 to, u32 barrier, int row, int k, u32 rank) {
    if (PAIR == 'a') copy_to_both(a, to + rank * (A_BYTES / 2), barrier, k, row + rank * (ROWS / 2));
    else copy(a, to, barrier, k, row);
}

// The same of b.
__device__ __forceinline__ void copy_b(const TensorMap& b, u32 to, u32 barrier, int column, int k, u32 rank) {
    constexpr int B_PART = PAIR == 'b' ? 2 : 1;
    const u32 b_to = to + A_BYTES;
    if (ACROSS) {
#pragma unroll
        for (int c = 0; c < B_CHUNKS / B_PART; ++c) {
            const int chunk = PAIR == 'b' ? rank * (B_CHUNKS / 2) + c : c;
            if (PAIR == 'b') copy_to_both(b, b_to + chunk * CHUNK, barrier, column + 64 * chunk, k);
            else copy(b, b_to + chunk * CHUNK, barrier, column + 64 * chunk, k);
        }
    } else if (PAIR == 'b') copy_to_both(b, b_to + rank * (B_BYTES / 2), barrier, k, column + rank * (COLUMNS / 2));
    else copy(b, b_to, barrier, k, column);
}

// A leaf: the accumulator from +0, `steps` stages of the ring in order. A stage is given back once the products that read it are done.
__device__ __forceinline__ void accumulate(
    float (&acc)[FLOATS], Ring& ring, int steps, u32 start, u32 empty, int group, int lane) {
    const u32 full = empty - 8 * STAGES;
    u32 before = 0;
    pin(acc);
#pragma unroll 1
    for (int step = 0; step < steps; ++step, ring.next()) {
        barrier_wait(full + 8 * ring.stage, ring.phase);
        const u32 a_at = start + ring.stage * (A_BYTES + B_BYTES), b_at = a_at + A_BYTES;
        const u64 x = descriptor(a_at + group * CHUNK, false), y = descriptor(b_at, ACROSS);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int g = 0; g < DEPTH / GROUP; ++g)
            multiply(acc, x + g * 2, y + g * (ACROSS ? GROUP * LINE >> 4 : 2), step | g);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        await_products<1>();
        if (step && lane < (PAIR ? 2 : 1)) barrier_arrive(before, lane);
        before = empty + 8 * ring.stage;
    }
    await_products<0>();
    pin(acc);
    if (steps && lane < (PAIR ? 2 : 1)) barrier_arrive(before, lane);
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
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
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
            Ring ring;
            for (int tile = cluster; tile < p.tiles(); tile += clusters) {
                int row, column;
                p.place(tile, rank, row, column);
                for (int leaf = first_leaf; leaf < first_leaf + p.leaves; ++leaf) {
                    for (int step = 0; step < steps; ++step, ring.next(), --early) {
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
    float4* const desk = p.desks + (long long)blockIdx.x * 2 * QUADS * WORKERS + threadIdx.x;
    float acc[FLOATS];
    Desk<KEEP0, SHARED0> leaves;
    Desk<KEEP1, SHARED1> pairs;
    Desk<KEEP2, SHARED2> fours;
    leaves.shared = shared, leaves.global = desk;  // never global: KEEP0 + SHARED0 = FLOATS wherever a block has two leaves
    pairs.shared = shared + SHARED0 / 4 * WORKERS, pairs.global = desk;
    fours.shared = shared + (SHARED0 + SHARED1) / 4 * WORKERS, fours.global = desk + QUADS * WORKERS;
    Ring ring;
    for (int tile = cluster; tile < p.tiles(); tile += clusters) {
        int row, column;
        p.place(tile, rank, row, column);
        row += group * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
#if KEEP0 + SHARED0
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
