// Draws one token per row of logits, and the ids that top-k and top-p retain, in one launch for Hopper: a cluster of CLUSTER blocks holds a
// row in shared memory, so that it is read from global memory once.
//
// A block holds a slice of the row as keys: integers that order t = z/T, -0 as +0. A warp owns `groups` times 32 ids that follow each
// other. A cut is looked for by the digits of its distance from the highest key, 11, 11 and 10 bits: for each digit the measure (1 for
// top_k, the weight for top_p) of every value of it is summed in bins, and the bin in which the running sum reaches what is wanted holds
// the cut. Among equal keys lower ids come first. All sums are of integers: their order is free.
//
// Compiled with: CLUSTER, THREADS.

#include "power.h"  // generated: POWER0 to POWER6, the rule's polynomial

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARPS = THREADS / 32, BINS = 2048, SHARE = BINS / CLUSTER;
constexpr int LOWEST = -2147483647 - 1;  // where there is no id; no finite t has this key
constexpr u32 EVERY_LANE = 0xffffffffu;
constexpr int AHEAD = 8;  // logits that a thread asks for at once

static_assert(SHARE <= THREADS && CLUSTER <= 32 && WARPS <= 32, "one bin of the block's share per thread");

struct Step {
    const float *logits, *temperature;
    const i64 *top_p, *top_k, *seed, *position;
    i64* ids;
    u32* support;  // null: no supports
    u64* failed;
    i64 row_stride;
    int vocab, words, groups, by_count, by_weight;
};

#ifndef EMULATED
#define SHARED(name) extern __shared__ u64 name[]

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

__device__ __forceinline__ u64 of_block(const u64* shared, u32 rank) {
    u32 there;
    u64 value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"((u32)__cvta_generic_to_shared(shared)), "r"(rank));
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(there) : "memory");
    return value;
}
#endif

__device__ __forceinline__ int key_of(float t) {
    int bits = __float_as_int(t == 0.0f ? 0.0f : t);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

__device__ __forceinline__ float value_of(int key) { return __int_as_float(key < 0 ? key ^ 0x7fffffff : key); }

__device__ __forceinline__ u64 weight_of(float x) {
    float y = fmaxf(__fmul_rn(x, 1.4426950408889634f), -64.0f);
    float n = floorf(y), f = __fsub_rn(y, n);
    float p = __fadd_rn(__fmul_rn(f, POWER6), POWER5);
    p = __fadd_rn(__fmul_rn(p, f), POWER4);
    p = __fadd_rn(__fmul_rn(p, f), POWER3);
    p = __fadd_rn(__fmul_rn(p, f), POWER2);
    p = __fadd_rn(__fmul_rn(p, f), POWER1);
    p = __fadd_rn(__fmul_rn(p, f), POWER0);
    return ((u64)(u32)__fmul_rn(p, 8388608.0f) << 21) >> min(-(int)n, 63);
}

// ceil(top_p · total), at least 1; top_p is the fixed point's bits
__device__ __forceinline__ u64 share_of(u64 top_p, u64 total) {
    u64 wanted = __umul64hi(top_p, total) + (top_p * total != 0);
    return wanted ? wanted : 1;
}

// First 64 bits of Philox4x64-10, key (seed, 0), counter (position + 1, 0, 0, 0)
__device__ __forceinline__ u64 philox(u64 seed, u64 position) {
    u64 c0 = position + 1, c1 = 0, c2 = 0, c3 = 0, k0 = seed, k1 = 0;
    for (int i = 0; i < 10; i++) {
        u64 high0 = __umul64hi(0xD2E7470EE14C6C93ull, c0), low0 = 0xD2E7470EE14C6C93ull * c0;
        u64 high1 = __umul64hi(0xCA5A826395121157ull, c2), low1 = 0xCA5A826395121157ull * c2;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B97F4A7C15ull, k1 += 0xBB67AE8584CAA73Bull;
    }
    return c0;
}

__device__ __forceinline__ u64 warp_sum(u64 value) {
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(EVERY_LANE, value, step);
    return value;
}

__device__ __forceinline__ u64 warp_running(u64 value) {
    for (int step = 1; step < 32; step *= 2) {
        u64 before = __shfl_up_sync(EVERY_LANE, value, step);
        if ((threadIdx.x & 31) >= step) value += before;
    }
    return value;
}

// A sum of 64 bits in two halves: shared memory adds 32 bits at a time, and the second half seldom changes.
__device__ __forceinline__ void add(u64* bin, u64 value) {
    u32* half = (u32*)bin;
    u32 low = (u32)value, high = (u32)(value >> 32);
    if (low) high += atomicAdd(half, low) + low < low;
    if (high) atomicAdd(half + 1, high);
}

// What the row retains: higher keys, and ids up to `id` of this one.
struct Cut {
    int key, id;
    __device__ bool holds(int k, int i) const { return k > key || (k == key && i <= id); }
};

struct Block {
    u64 *bins, *desk, *parts;
    int* keys;
    int groups, warp, lane, first, turn, top;  // first: the warp's first id; top: the row's highest key
    u32 rank;

    // Place of group g's id of this lane in the slice, and that id
    __device__ __forceinline__ int place(int g) const { return (warp * groups + g) * 32 + lane; }
    __device__ __forceinline__ int id(int g) const { return first + g * 32 + lane; }
    __device__ __forceinline__ u64 weight(int key) const { return weight_of(__fsub_rn(value_of(key), value_of(top))); }

    __device__ __forceinline__ u64* next_desk() {
        turn ^= 1;
        return desk + 2 * turn;
    }

    // Lane r of every warp: the value that block r gave. A desk is used again only after the next exchange, when all have read it.
    __device__ u64 exchange(u64 value) {
        u64* slot = next_desk();
        if (threadIdx.x == 0) slot[0] = value;
        cluster_sync();
        return lane < CLUSTER ? of_block(slot, lane) : 0;
    }

    // Sum over the block of one value per warp, and in `before` that of the warps before this one
    __device__ u64 block_sum(u64 of_warp, u64& before) {
        if (lane == 0) parts[warp] = of_warp;
        __syncthreads();
        u64 part = lane < WARPS ? parts[lane] : 0;
        before = warp_sum(lane < warp ? part : 0);
        return warp_sum(part);
    }

    // The block in which the running sum of all blocks' values, `value` in lane r that of block r, first reaches `wanted`; in `above` the
    // sum before it
    __device__ u32 owner_of(u64 value, u64 wanted, u64& above) {
        u64 running = above + warp_running(value);
        u32 owner = __popc(__ballot_sync(EVERY_LANE, lane < CLUSTER && running < wanted));
        above = __shfl_sync(EVERY_LANE, running - value, owner & 31);
        return owner;
    }

    __device__ void clear_bins() {
        for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    }

    // The cut of what `within` holds, by the measure BY_WEIGHT says. limit: top_k, or the bits of top_p.
    template <bool BY_WEIGHT> __device__ Cut narrow(Cut within, u64 limit) {
        u64 above = 0, wanted = 0;
        u32 start = 0, count = BINS;
        for (int shift = 21;;) {
            for (int g = 0; g < groups; g++) {
                int key = keys[place(g)];
                u32 bin = ((u32)top - (u32)key - start) >> shift;
                if (key != LOWEST && bin < count && within.holds(key, id(g))) add(bins + bin, BY_WEIGHT ? weight(key) : 1);
            }
            cluster_sync();
            u64 sum = 0, before;
            if (threadIdx.x < SHARE)
                for (int r = 0; r < CLUSTER; r++) sum += of_block(bins + rank * SHARE + threadIdx.x, r);
            u64 running = warp_running(sum);
            u64 total = block_sum(__shfl_sync(EVERY_LANE, running, 31), before);
            u64 totals = exchange(total);
            clear_bins();
            if (shift == 21) wanted = BY_WEIGHT ? share_of(limit, warp_sum(totals)) : limit;
            u32 owner = owner_of(totals, wanted, above);
            u64* slot = next_desk();
            running += above + before;
            if (rank == owner && running >= wanted && running - sum < wanted) {
                slot[0] = rank * SHARE + threadIdx.x;
                slot[1] = running - sum;
            }
            cluster_sync();
            start += (u32)of_block(slot, owner) << shift;
            above = of_block(slot + 1, owner);
            if (shift == 0) break;
            int finer = shift == 21 ? 10 : 0;
            count = 1u << (shift - finer);
            shift = finer;
        }
        Cut cut = {(int)((u32)top - start), 0};
        u64 rest = wanted - above, each = BY_WEIGHT ? weight(cut.key) : 1;
        cut.id = nth(within, cut.key, (rest + each - 1) / each);
        return cut;
    }

    // The id that is number n, from 1, of those of `key` that `within` holds
    __device__ int nth(Cut within, int key, u64 n) {
        u64 found = 0, before, above = 0;
        for (int g = 0; g < groups; g++)
            found += __popc(__ballot_sync(EVERY_LANE, keys[place(g)] == key && within.holds(key, id(g))));
        u64 total = block_sum(found, before);
        u32 owner = owner_of(exchange(total), n, above);
        u64* slot = next_desk();
        before += above;
        if (rank == owner && before < n && before + found >= n)
            for (int g = 0; g < groups; g++) {
                u32 here = __ballot_sync(EVERY_LANE, keys[place(g)] == key && within.holds(key, id(g)));
                if ((here >> lane & 1) && before + __popc(here & ((2u << lane) - 1)) == n) slot[0] = id(g);
                before += __popc(here);
            }
        cluster_sync();
        return (int)of_block(slot, owner);
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, THREADS > 512 ? 1 : 2) sample(const Step s) {
    SHARED(room);
    Block b;
    b.bins = room, b.desk = room + BINS, b.parts = b.desk + 4, b.keys = (int*)(b.parts + 32);
    b.groups = s.groups, b.warp = threadIdx.x / 32, b.lane = threadIdx.x & 31, b.turn = 0, b.rank = rank_in_cluster();
    b.first = (b.rank * WARPS + b.warp) * b.groups * 32;
    const i64 row = blockIdx.x / CLUSTER, k = s.top_k[row], top_p = s.top_p[row];
    const float* z = s.logits + row * s.row_stride;
    const float temperature = s.temperature[row];

    int key = LOWEST, at = 0;
    bool finite = true;
    for (int g = 0; g < b.groups; g += AHEAD) {
        float read[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) read[a] = g + a < b.groups && b.id(g + a) < s.vocab ? __ldg(z + b.id(g + a)) : 0.0f;
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (g + a < b.groups) {
                float t = __fdiv_rn(read[a], temperature);
                bool real = b.id(g + a) < s.vocab;
                int mine = real ? key_of(t) : LOWEST;
                finite &= !real || fabsf(t) <= 3.4028234663852886e38f;
                b.keys[b.place(g + a)] = mine;
                if (mine > key) key = mine, at = b.id(g + a);
            }
    }
    b.clear_bins();
    i64 best = finite ? (i64)((u64)(u32)key << 32 | (u32)(0x7fffffff - at)) : 0x7fffffffffffffffll;
    for (int step = 16; step; step /= 2) best = max(best, (i64)__shfl_xor_sync(EVERY_LANE, best, step));
    if (b.lane == 0) b.parts[b.warp] = best;
    __syncthreads();
    best = b.lane < WARPS ? (i64)b.parts[b.lane] : (i64)((u64)1 << 63);
    for (int step = 16; step; step /= 2) best = max(best, (i64)__shfl_xor_sync(EVERY_LANE, best, step));
    best = b.exchange(best);
    best = b.lane < CLUSTER ? best : (i64)((u64)1 << 63);
    for (int step = 16; step; step /= 2) best = max(best, (i64)__shfl_xor_sync(EVERY_LANE, best, step));
    b.top = (int)(best >> 32);

    const bool by_count = k > 0 && k < s.vocab, by_weight = k != 0 && top_p != -1;
    const bool overlooked = (by_count && !s.by_count) || (by_weight && !s.by_weight), leads = b.rank == 0 && threadIdx.x == 0;
    if (overlooked || best == 0x7fffffffffffffffll) {
        if (leads) {
            s.ids[row] = 0;
            if (atomicCAS(s.failed, 0ull, overlooked ? 2ull : 1ull) == 0) s.failed[1] = s.seed[row], s.failed[2] = s.position[row];
        }
    } else {
        Cut cut = {LOWEST, 0};
        if (k != 0 && by_count) cut = b.narrow<false>(cut, k);
        if (by_weight) cut = b.narrow<true>(cut, top_p);
        u64 mass = 0, before;
        u32 word = 0;
        for (int g = 0; g < b.groups; g++) {
            int mine = b.keys[b.place(g)];
            bool kept = mine != LOWEST && cut.holds(mine, b.id(g));
            u32 bits = __ballot_sync(EVERY_LANE, kept);
            if (kept && k != 0) mass += b.weight(mine);
            if (s.support) {
                if ((g & 31) == b.lane) word = bits;
                int first = b.first / 32 + (g & ~31);
                if (((g & 31) == 31 || g == b.groups - 1) && b.lane <= (g & 31) && first + b.lane < s.words)
                    s.support[row * s.words + first + b.lane] = word;
            }
        }
        if (k == 0) {
            if (leads) s.ids[row] = 0x7fffffff - (int)(best & 0x7fffffff);
        } else {
            u64 of_warp = warp_sum(mass), above = 0;
            u64 totals = b.exchange(b.block_sum(of_warp, before));
            u64 target = __umul64hi(philox(s.seed[row], s.position[row]), warp_sum(totals));
            u32 owner = b.owner_of(totals, target + 1, above);
            before += above;
            if (b.rank == owner && before <= target && target < before + of_warp) {
                for (int g = 0; g < b.groups; g++) {
                    int mine = b.keys[b.place(g)];
                    u64 own = mine != LOWEST && cut.holds(mine, b.id(g)) ? b.weight(mine) : 0;
                    u64 running = before + warp_running(own);
                    if (running > target && running - own <= target) s.ids[row] = b.id(g);
                    before = __shfl_sync(EVERY_LANE, running, 31);
                }
            }
        }
    }
    cluster_sync();
}
