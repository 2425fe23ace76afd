// Attention's gradients over packed sequences for Hopper, in the contract's order: dq, whose blocks own states, and dk with dv, whose blocks
// own keys. Every sum has one accumulator.

#include "sm90_blocks.h"

constexpr int OWN_BYTES = 4 * CHUNK, TILE_BYTES = 2 * CHUNK;  // of two halves of a block's own rows; of a tile of the other side

struct Problem {
    Matrix q, d_out, k, v;
    const float *lse2, *delta;
    long long sum_row_stride, sum_head_stride;
    unsigned short *first, *second;  // dq; dk and dv
    float c, scale;
};

// s = a·bᵀ over 128 columns of 64 rows each, both in shared memory.
__device__ __forceinline__ void multiply_shared(float (&s)[32], u64 a, u64 b) {
#pragma unroll
    for (int g = 0; g < DIM / 16; ++g) scores(s, a + g / 4 * (CHUNK >> 4) + g % 4 * 2, b + g / 4 * (CHUNK >> 4) + g % 4 * 2, g);
}

// o continued by p·b over the 64 rows of b, from +0 or what it was.
__device__ __forceinline__ void add(float (&o)[64], const u32 (&p)[16], u32 b, bool keep) {
    const u64 rows = descriptor(b, true);
#pragma unroll
    for (int g = 0; g < TILE / 16; ++g)
        add_rows(o, p[4 * g], p[4 * g + 1], p[4 * g + 2], p[4 * g + 3], rows + g * (16 * LINE >> 4), g ? 1 : keep);
}

// Two rows of a thread's sums, times scale, in bf16.
__device__ __forceinline__ void store(unsigned short* out, const float (&o)[64], float scale, const long long (&row)[2],
                                      const bool (&real)[2], int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            u32 x[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) x[i] = rounded(o[4 * (j + i) + 2 * h] * scale, o[4 * (j + i) + 2 * h + 1] * scale);
            transpose(x, lane);
            if (real[h]) *(uint4*)(out + row[h] * DIM + 8 * (j + lane % 4)) = make_uint4(x[0], x[1], x[2], x[3]);
        }
}

struct Shared {  // addresses: of the block's own rows, and of the first of two rings of tiles; of their barriers
    u32 own, other, own_full, own_free, other_full, other_free;
    __device__ __forceinline__ u32 first_tile(const Ring& ring) const { return other + ring.stage * 2 * TILE_BYTES; }
    __device__ __forceinline__ u32 second_tile(const Ring& ring) const { return first_tile(ring) + TILE_BYTES; }
    __device__ __forceinline__ u32 first_full(const Ring& ring) const { return other_full + 16 * ring.stage; }
    __device__ __forceinline__ u32 second_full(const Ring& ring) const { return other_full + 16 * ring.stage + 8; }
    __device__ __forceinline__ u32 first_free(const Ring& ring) const { return other_free + 16 * ring.stage; }
    __device__ __forceinline__ u32 second_free(const Ring& ring) const { return other_free + 16 * ring.stage + 8; }
    __device__ __forceinline__ void await_tiles(const Ring& ring) const {
        barrier_wait(first_full(ring), ring.phase);
        barrier_wait(second_full(ring), ring.phase);
    }
};

// arrivals, readers: that fill a second tile, and that free it.
__device__ __forceinline__ Shared prepare(unsigned char* dynamic, u64* barriers, int arrivals, int readers) {
    Shared at;
    at.own = (address(dynamic) + 1023) & ~1023u, at.other = at.own + 2 * OWN_BYTES;
    at.own_full = address(barriers), at.own_free = at.own_full + 8, at.other_full = at.own_free + 8, at.other_free = at.other_full + 16 * STAGES;
    if (threadIdx.x == 0) {
        barrier_init(at.own_full, 1), barrier_init(at.own_free, 32 * WARPS);
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(at.other_full + 16 * s, 1), barrier_init(at.other_full + 16 * s + 8, arrivals);
            barrier_init(at.other_free + 16 * s, WARPS), barrier_init(at.other_free + 16 * s + 8, readers);
        }
        barriers_ready();
    }
    __syncthreads();
    return at;
}

// dS in place of the scores s, with d = dP; rows are states, columns the keys from `low` on.
__device__ __forceinline__ void state_slopes(float (&s)[32], const float (&d)[32], float c, int low, bool masked, const int (&position)[2],
                                             const float (&lse2)[2], const float (&delta)[2], int lane) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = s[i] * c;
    if (masked) mask(s, low, position, lane);
    u32 least = 0x80000000u;
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        s[i] = s[i] - lse2[i / 2 % 2], s[i + 1] = s[i + 1] - lse2[i / 2 % 2];
        least = __vimax3_u32(least, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
    }
    exponentials(s, __uint_as_float(least));
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = s[i] * (d[i] - delta[i / 2 % 2]);
}

__device__ __forceinline__ void produce_keys(const TensorMap& q, const TensorMap& d_out, const TensorMap& k, const TensorMap& v,
                                             const Problem& p, const Queue& queue, const Shared& at, Work* told, int lane) {
    Ring ring;
    Work w;
    u32 phase = 1;
    while (take<STEP, true>(queue, lane, w)) {
        w.tiles = (w.position + min(STEP, w.rows) + TILE - 1) / TILE;
        for (int tile = 0; tile < w.tiles; ++tile, ring.next()) {
            const int low = tile * TILE;
            barrier_wait(at.first_free(ring), ring.phase ^ 1);
            load_rows(k, p.k, w.kv_head, w.first + low, w.length - low, at.first_tile(ring), at.first_full(ring), lane);
            if (tile == 0) {
                barrier_wait(at.own_free, phase);
                phase ^= 1;
                if (lane == 0) {
                    tell(told, w);
                    barrier_expect(at.own_full, 2 * OWN_BYTES);
                    load_states(q, w, at.own, at.own_full);
                    load_states(d_out, w, at.own + OWN_BYTES, at.own_full);
                }
                __syncwarp();
            }
            barrier_wait(at.second_free(ring), ring.phase ^ 1);
            load_rows(v, p.v, w.kv_head, w.first + low, w.length - low, at.second_tile(ring), at.second_full(ring), lane);
        }
    }
    barrier_wait(at.own_free, phase);
    if (lane == 0) leave(queue, told, at.own_full);
}

// dq [rows, heads, 128].
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_query_gradient_sm90(
    const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap d_out, const __grid_constant__ TensorMap k,
    const __grid_constant__ TensorMap v, const Queue queue, const Problem p) {
    extern __shared__ unsigned char dynamic[];
    __shared__ alignas(8) u64 barriers[4 * STAGES + 2];
    __shared__ Work told;
    const Shared at = prepare(dynamic, barriers, 1, WARPS);
    const int lane = threadIdx.x % 32, part = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32;
    if (part == 2) {
        copies();
        if (warp == 0) produce_keys(q, d_out, k, v, p, queue, at, &told, lane);
        return;
    }
    multiplies();
    const int state = part * 64 + warp * 16 + lane / 4, heads = queue.kv_heads * GROUP;
    const u32 own = at.own + part * 2 * CHUNK + warp * 16 * LINE;
    Ring ring;
    float s[32], d[32], sums[64];
    u32 w[16], queries[32], d_outs[32], phase = 0;
    for (;;) {
        barrier_wait(at.own_full, phase);
        phase ^= 1;
        const Work work = told;
        if (!work.tiles) return;
        hold(queries, own, lane);
        hold(d_outs, own + OWN_BYTES, lane);
        held(at.own_free);
        const int position[2] = {work.position + state / GROUP, work.position + (state + 8) / GROUP};
        const int plain = (work.position + 1) / TILE * TILE;
        float lse2[2], delta[2];
        bool real[2];
        long long row[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int place = (state + 8 * h) / GROUP, head = work.kv_head * GROUP + (state + 8 * h) % GROUP;
            real[h] = place < work.rows;
            row[h] = (long long)(work.row + place) * heads + head;
            const long long sum = (work.row + place) * p.sum_row_stride + head * p.sum_head_stride;
            lse2[h] = real[h] ? p.lse2[sum] : 0.0f, delta[h] = real[h] ? p.delta[sum] : 0.0f;
        }
        at.await_tiles(ring);
        products_begin();
        multiply(s, queries, descriptor(at.first_tile(ring), false));
        multiply(d, d_outs, descriptor(at.second_tile(ring), false));
        products_end();
        await_products<0>();
        pin(s);
        pin(d);
        if (lane == 0) barrier_arrive(at.second_free(ring));
        state_slopes(s, d, p.c, 0, plain <= 0, position, lse2, delta, lane);
#pragma unroll
        for (int i = 0; i < 16; ++i) w[i] = pack(s[2 * i], s[2 * i + 1]);
        Ring last = ring;
        ring.next();
#pragma unroll 1
        for (int tile = 1; tile < work.tiles; ++tile) {
            at.await_tiles(ring);
            products_begin();
            multiply(s, queries, descriptor(at.first_tile(ring), false));
            multiply(d, d_outs, descriptor(at.second_tile(ring), false));
            products_end();
            products_begin();
            add(sums, w, at.first_tile(last), tile > 1);
            products_end();
            await_products<1>();
            pin(s);
            pin(d);
            if (lane == 0) barrier_arrive(at.second_free(ring));
            state_slopes(s, d, p.c, tile * TILE, tile * TILE >= plain, position, lse2, delta, lane);
            pin(s);
            await_products<0>();
            pin(sums);
            if (lane == 0) barrier_arrive(at.first_free(last));
#pragma unroll
            for (int i = 0; i < 16; ++i) w[i] = pack(s[2 * i], s[2 * i + 1]);
            last = ring;
            ring.next();
        }
        products_begin();
        add(sums, w, at.first_tile(last), work.tiles > 1);
        products_end();
        await_products<0>();
        pin(sums);
        if (lane == 0) barrier_arrive(at.first_free(last));
        store(p.first, sums, p.scale, row, real, lane);
    }
}

// Tiles of queries from the group of 16 on that sees a block's first key, for one head of the group after the other. Beside dO lie the
// tile's lse2 and delta; absent queries have 0 there and rows of +0: P = 1, dO = 0 and dS = 0 add nothing.
__device__ __forceinline__ void produce_queries(const TensorMap& q, const TensorMap& d_out, const TensorMap& k, const TensorMap& v,
                                                const Problem& p, const Queue& queue, const Shared& at, Work* told,
                                                float (&lines)[STAGES][2][TILE], int lane) {
    Ring ring;
    Work w;
    u32 phase = 1;
    while (take<128, false>(queue, lane, w)) {
        const int low = w.position / 16 * 16;
        w.tiles = (w.length - low + TILE - 1) / TILE;
        for (int i = 0; i < GROUP * w.tiles; ++i, ring.next()) {
            const int head = w.kv_head * GROUP + i / w.tiles, query = low + i % w.tiles * TILE, left = w.length - query;
            barrier_wait(at.first_free(ring), ring.phase ^ 1);
            load_rows(q, p.q, head, w.first + query, left, at.first_tile(ring), at.first_full(ring), lane);
            if (i == 0) {
                barrier_wait(at.own_free, phase);
                phase ^= 1;
                if (lane == 0) {
                    tell(told, w);
                    barrier_expect(at.own_full, 2 * OWN_BYTES);
#pragma unroll
                    for (int part = 0; part < 4; ++part) {
                        const int column = part % 2 * 64, row = w.row + part / 2 * 64;
                        copy(k, at.own + part * CHUNK, at.own_full, w.kv_head * p.k.head_stride + column, row);
                        copy(v, at.own + OWN_BYTES + part * CHUNK, at.own_full, w.kv_head * p.v.head_stride + column, row);
                    }
                }
                __syncwarp();
            }
            barrier_wait(at.second_free(ring), ring.phase ^ 1);
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const int place = part % 2 * 32 + lane;
                const long long sum = place < left ? (w.first + query + place) * p.sum_row_stride + head * p.sum_head_stride : 0;
                asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(address(&lines[ring.stage][part / 2][place])),
                             "l"((part < 2 ? p.lse2 : p.delta) + sum), "r"(place < left ? 4 : 0) : "memory");
            }
            asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(at.second_full(ring)) : "memory");
            load_rows(d_out, p.d_out, head, w.first + query, left, at.second_tile(ring), at.second_full(ring), lane);
        }
    }
    barrier_wait(at.own_free, phase);
    if (lane == 0) leave(queue, told, at.own_full);
}

// dk and dv [rows, KV heads, 128].
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_key_gradient_sm90(
    const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap d_out, const __grid_constant__ TensorMap k,
    const __grid_constant__ TensorMap v, const Queue queue, const Problem p) {
    extern __shared__ unsigned char dynamic[];
    __shared__ alignas(8) u64 barriers[4 * STAGES + 2];
    __shared__ Work told;
    __shared__ alignas(16) float lines[STAGES][2][TILE];
    const Shared at = prepare(dynamic, barriers, 33, 32 * WARPS);
    const int lane = threadIdx.x % 32, part = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x % 128 / 32;
    if (part == 2) {
        copies();
        if (warp == 0) produce_queries(q, d_out, k, v, p, queue, at, &told, lines, lane);
        return;
    }
    multiplies();
    const int place = part * 64 + warp * 16 + lane / 4;
    const u64 keys = descriptor(at.own + part * 2 * CHUNK, false), value_rows = descriptor(at.own + OWN_BYTES + part * 2 * CHUNK, false);
    Ring ring;
    float s[32], d[32], sum_k[64], sum_v[64];
    u32 phase = 0;
    for (;;) {
        barrier_wait(at.own_full, phase);
        phase ^= 1;
        const Work work = told;
        if (!work.tiles) return;
        const int key[2] = {work.position + place, work.position + place + 8}, low = work.position / 16 * 16, count = work.tiles * GROUP;
        int tile = 0;
#pragma unroll 1
        for (int i = 0; i < count; ++i, ring.next()) {
            at.await_tiles(ring);
            products_begin();
            multiply_shared(s, keys, descriptor(at.first_tile(ring), false));
            multiply_shared(d, value_rows, descriptor(at.second_tile(ring), false));
            products_end();
            await_products<0>();
            pin(s);
            pin(d);
            const int query = low + tile * TILE;
#pragma unroll
            for (int j = 0; j < 32; ++j) s[j] = s[j] * p.c;
            if (query < work.position + part * 64 + 63) {  // some query does not see some key
                const int at_column = query + lane % 4 * 2;
#pragma unroll
                for (int j = 0; j < 32; ++j)
                    if (key[j / 2 % 2] > at_column + j / 4 * 8 + j % 2) s[j] = MINUS_INFINITY;
            }
            const float2* const lse2 = (const float2*)lines[ring.stage][0] + lane % 4;
            const float2* const delta = (const float2*)lines[ring.stage][1] + lane % 4;
            u32 least = 0x80000000u;
#pragma unroll
            for (int j = 0; j < 32; j += 2) {
                const float2 x = lse2[j / 4 * 4];
                s[j] = s[j] - x.x, s[j + 1] = s[j + 1] - x.y;
                least = __vimax3_u32(least, __float_as_uint(s[j]), __float_as_uint(s[j + 1]));
            }
            exponentials(s, __uint_as_float(least));
#pragma unroll
            for (int j = 0; j < 32; j += 2) {
                const float2 x = delta[j / 4 * 4];
                d[j] = s[j] * (d[j] - x.x), d[j + 1] = s[j + 1] * (d[j + 1] - x.y);
            }
            u32 w[16], y[16];
#pragma unroll
            for (int j = 0; j < 16; ++j) w[j] = pack(s[2 * j], s[2 * j + 1]), y[j] = pack(d[2 * j], d[2 * j + 1]);
            products_begin();
            add(sum_v, w, at.second_tile(ring), i > 0);
            add(sum_k, y, at.first_tile(ring), i > 0);
            products_end();
            await_products<0>();
            pin(sum_v);
            pin(sum_k);
            barrier_arrive(at.second_free(ring));
            if (lane == 0) barrier_arrive(at.first_free(ring));
            if (i + 1 == count) barrier_arrive(at.own_free);
            if (++tile == work.tiles) tile = 0;
        }
        const bool real[2] = {place < work.rows, place + 8 < work.rows};
        const long long row[2] = {(long long)(work.row + place) * queue.kv_heads + work.kv_head,
                                  (long long)(work.row + place + 8) * queue.kv_heads + work.kv_head};
        store(p.first, sum_k, p.scale, row, real, lane);
        store(p.second, sum_v, 1.0f, row, real, lane);
    }
}
