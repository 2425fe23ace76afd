// Draws one token per row of logits, and the ids that top-k and top-p retain, in one launch for Hopper: a cluster of CLUSTER blocks holds a
// row in shared memory, so that it is read from global memory once.
//
// A block holds a slice of the row as keys: integers that order t = z/T, -0 as +0. A warp owns `groups` times 128 ids that follow each
// other, four to a lane. A cut is looked for by the digits of its distance from the highest key, 11, 11 and 10 bits: for each digit the
// measure (1 for top_k, the weight for top_p) of every value of it is summed in bins, and the bin in which the running sum reaches what is
// wanted holds the cut. Among equal keys lower ids come first. All sums are of integers: their order is free.
//
// Compiled with: CLUSTER, THREADS.

#include "power.h"  // generated: POWER0 to POWER6, the rule's polynomial

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr int WARPS = THREADS / 32, BINS = 2048, SHARE = BINS / CLUSTER;
constexpr int QUAD = 4, GROUP = 32 * QUAD;       // ids of a lane, and of a warp, that are taken together
constexpr int LOWEST = -2147483647 - 1;          // where there is no id; no finite t has this key
constexpr int TOO_HIGH = 0x7f800000;             // keys of finite t are less than this one
constexpr int TOO_LOW = LOWEST + 0x7fffff;       // and greater than this one
constexpr u32 EVERY_LANE = 0xffffffffu;
constexpr int AHEAD = 5;  // groups that are asked for at once

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

// z/T rounded to nearest, given 1/T rounded to nearest: a quotient of one correction is off by less than a unit, one of two is the IEEE
// quotient. Where a remainder might be subnormal or a product overflow, the division of the language.
__device__ __forceinline__ float divided(float z, float t, float reciprocal) {
    if (t == 1.0f) return z;
    float size = fabsf(z);
    if (!(size > 1e-24f && size < 1e24f && t > 1e-6f && t < 1e6f)) return __fdiv_rn(z, t);
    float q = __fmul_rn(z, reciprocal);
    q = __fmaf_rn(__fmaf_rn(-q, t, z), reciprocal, q);
    return __fmaf_rn(__fmaf_rn(-q, t, z), reciprocal, q);
}

// The rule's step 2. Adding 3·2^22 rounds y to an integer, which is then in the low bits; the bits of 1 <= p <= 2 count units of 2^-23.
__device__ __forceinline__ u64 weight_of(float x) {
    float y = fmaxf(__fmul_rn(x, 1.4426950408889634f), -64.0f);
    float rounded = __fadd_rn(y, 12582912.0f), n = __fsub_rn(rounded, 12582912.0f);
    int shift = 0x4b400000 - __float_as_int(rounded);
    if (n > y) n = __fsub_rn(n, 1.0f), shift++;
    float f = __fsub_rn(y, n);
    float p = __fadd_rn(__fmul_rn(f, POWER6), POWER5);
    p = __fadd_rn(__fmul_rn(p, f), POWER4);
    p = __fadd_rn(__fmul_rn(p, f), POWER3);
    p = __fadd_rn(__fmul_rn(p, f), POWER2);
    p = __fadd_rn(__fmul_rn(p, f), POWER1);
    p = __fadd_rn(__fmul_rn(p, f), POWER0);
    return (u64)(u32)(__float_as_int(p) - 0x3f000000) << 21 >> min(shift, 63);
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
    int4* keys;
    int groups, warp, lane, first, turn, top;  // first: the lane's first id; top: the row's highest key
    u32 rank;

    __device__ __forceinline__ u64 weight(int key) const { return weight_of(__fsub_rn(value_of(key), value_of(top))); }

    __device__ __forceinline__ int4* place(int g) const { return keys + (warp * groups + g) * 32 + lane; }

    // visit(key, id) for the lane's ids of group g, ascending
    template <class Visit> __device__ __forceinline__ void group(int g, Visit visit) const {
        int4 quad = *place(g);
        int id = first + g * GROUP;
        visit(quad.x, id), visit(quad.y, id + 1), visit(quad.z, id + 2), visit(quad.w, id + 3);
    }

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
            for (int g = 0; g < groups; g++)
                group(g, [&](int key, int id) {
                    u32 bin = ((u32)top - start - (u32)key) >> shift;
                    if (bin < count && within.holds(key, id)) add(bins + bin, BY_WEIGHT ? weight(key) : 1);
                });
            cluster_sync();
            u64 sum = 0, before;
            if (threadIdx.x < SHARE) {
#pragma unroll
                for (int r = 0; r < CLUSTER; r++) sum += of_block(bins + rank * SHARE + threadIdx.x, r);
            }
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
        for (int g = 0; g < groups; g++) group(g, [&](int k, int id) { found += k == key && within.holds(k, id); });
        found = warp_sum(found);
        u64 total = block_sum(found, before);
        u32 owner = owner_of(exchange(total), n, above);
        u64* slot = next_desk();
        before += above;
        if (rank == owner && before < n && before + found >= n)
            for (int g = 0; g < groups; g++) {
                u64 here = 0;
                group(g, [&](int k, int id) { here += k == key && within.holds(k, id); });
                u64 running = before + warp_running(here);
                u64 number = running - here;
                group(g, [&](int k, int id) {
                    if (k == key && within.holds(k, id) && ++number == n) slot[0] = id;
                });
                before = __shfl_sync(EVERY_LANE, running, 31);
            }
        cluster_sync();
        return (int)of_block(slot, owner);
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, THREADS > 512 ? 1 : 2) sample(const Step s) {
    SHARED(room);
    Block b;
    b.bins = room, b.desk = room + BINS, b.parts = b.desk + 4, b.keys = (int4*)(b.parts + 32);
    b.groups = s.groups, b.warp = threadIdx.x / 32, b.lane = threadIdx.x & 31, b.turn = 0, b.rank = rank_in_cluster();
    b.first = (b.rank * WARPS + b.warp) * b.groups * GROUP + b.lane * QUAD;
    const i64 row = blockIdx.x / CLUSTER, k = s.top_k[row], top_p = s.top_p[row];
    const float* z = s.logits + row * s.row_stride;
    const float temperature = s.temperature[row], reciprocal = __frcp_rn(temperature);
    const bool aligned = ((u64)z & 15) == 0;

    int highest = LOWEST, lowest = 0;
    for (int g = 0; g < b.groups; g += AHEAD) {
        float4 read[AHEAD];
#pragma unroll
        for (int a = 0; a < AHEAD; a++) {
            int id = b.first + (g + a) * GROUP;
            if (g + a < b.groups) {
                if (aligned && id + QUAD <= s.vocab) {
                    read[a] = __ldg((const float4*)(z + id));
                } else {
                    float one[QUAD];
#pragma unroll
                    for (int c = 0; c < QUAD; c++) one[c] = id + c < s.vocab ? __ldg(z + id + c) : 0.0f;
                    read[a] = {one[0], one[1], one[2], one[3]};
                }
            }
        }
#pragma unroll
        for (int a = 0; a < AHEAD; a++)
            if (g + a < b.groups) {
                int id = b.first + (g + a) * GROUP;
                auto key = [&](float value, int at) {
                    int found = key_of(divided(value, temperature, reciprocal));
                    lowest = min(lowest, found);
                    if (at >= s.vocab) found = LOWEST;
                    highest = max(highest, found);
                    return found;
                };
                *b.place(g + a) = {key(read[a].x, id), key(read[a].y, id + 1), key(read[a].z, id + 2), key(read[a].w, id + 3)};
            }
    }
    b.clear_bins();
    if (lowest <= TOO_LOW) highest = TOO_HIGH;
    highest = __reduce_max_sync(EVERY_LANE, highest);
    if (b.lane == 0) b.parts[b.warp] = (u32)highest;
    __syncthreads();
    highest = __reduce_max_sync(EVERY_LANE, b.lane < WARPS ? (int)(u32)b.parts[b.lane] : LOWEST);
    highest = (int)(u32)b.exchange((u32)highest);
    b.top = __reduce_max_sync(EVERY_LANE, b.lane < CLUSTER ? highest : LOWEST);

    const bool by_count = k > 0 && k < s.vocab, by_weight = k != 0 && top_p != -1;
    const bool overlooked = (by_count && !s.by_count) || (by_weight && !s.by_weight), leads = b.rank == 0 && threadIdx.x == 0;
    if (overlooked || b.top >= TOO_HIGH) {
        if (leads) {
            s.ids[row] = 0;
            if (atomicCAS(s.failed, 0ull, overlooked ? 2ull : 1ull) == 0) s.failed[1] = s.seed[row], s.failed[2] = s.position[row];
        }
    } else {
        Cut cut = {LOWEST, -1};
        if (by_count) cut = b.narrow<false>(cut, k);
        if (by_weight) cut = b.narrow<true>(cut, top_p);
        if (k == 0) {
            int id = b.nth(cut, b.top, 1);
            if (leads) s.ids[row] = id;
        }
        u64 mass = 0, before;
        for (int g = 0; g < b.groups; g++) {
            u32 nibble = 0, at = 0;
            b.group(g, [&](int key, int id) {
                bool kept = cut.holds(key, id);
                nibble |= (u32)kept << at++;
                if (kept && k != 0) mass += b.weight(key);
            });
            if (s.support) {
                u32 word = nibble << QUAD * (b.lane & 7);
                for (int step = 1; step < 8; step *= 2) word |= __shfl_xor_sync(EVERY_LANE, word, step);
                int place = (b.first + g * GROUP) / 32;
                if ((b.lane & 7) == 0 && place < s.words) s.support[row * s.words + place] = word;
            }
        }
        if (k != 0) {
            u64 of_warp = warp_sum(mass), above = 0;
            u64 totals = b.exchange(b.block_sum(of_warp, before));
            u64 target = __umul64hi(philox(s.seed[row], s.position[row]), warp_sum(totals));
            u32 owner = b.owner_of(totals, target + 1, above);
            before += above;
            if (b.rank == owner && before <= target && target < before + of_warp)
                for (int g = 0; g < b.groups; g++) {
                    u64 own = 0;
                    b.group(g, [&](int key, int id) { own += cut.holds(key, id) ? b.weight(key) : 0; });
                    u64 running = before + warp_running(own);
                    u64 until = running - own;
                    if (running > target && until <= target)
                        b.group(g, [&](int key, int id) {
                            u64 weight = cut.holds(key, id) ? b.weight(key) : 0;
                            if (until <= target && target < until + weight) s.ids[row] = id;
                            until += weight;
                        });
                    before = __shfl_sync(EVERY_LANE, running, 31);
                }
        }
    }
    cluster_sync();
}
