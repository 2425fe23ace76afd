// Attention's forward pass over packed keys for Hopper, in the contract's order, with tiles of 64 keys.
//
// Each warpgroup starts the scores of its next tile before the values of the last, so that its exponentials run under its own and the
// other's products. The queries are held in registers, and so are the joined splits. A column of ones behind the values makes the row sums
// part of their product.

#include "sm90_blocks.h"

constexpr int Q_BYTES = 4 * CHUNK, K_BYTES = 2 * CHUNK, V_BYTES = 3 * CHUNK;

struct Problem {
    unsigned short* out;
    float* lse2;
    Matrix k, v;
    int split_tiles;
    float c;
};

// Scores of a tile to probabilities in place; m: maximum so far of the thread's two rows, alpha: what the state before is multiplied by.
__device__ __forceinline__ void softmax(float (&s)[32], float (&m)[2], float (&alpha)[2], float c, int low, const int (&position)[2],
                                        bool masked, int lane) {
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = s[i] * c;
    if (masked) mask(s, low, position, lane);
    float top[2] = {s[0], s[2]}, base[2];
    u32 least = 0x80000000u;  // -0: the bits of negative values ascend as the values fall
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
        top[i / 2 % 2] = fmaxf(fmaxf(top[i / 2 % 2], s[i]), s[i + 1]);
        least = __vimax3_u32(least, __float_as_uint(s[i]), __float_as_uint(s[i + 1]));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 1));
        top[h] = fmaxf(top[h], __shfl_xor_sync(~0u, top[h], 2));
        top[h] = fmaxf(m[h], top[h]);
        base[h] = top[h] == MINUS_INFINITY ? 0.0f : top[h];
        alpha[h] = exp2_kept(m[h] - base[h]);
        m[h] = top[h];
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = s[i] - base[i / 2 % 2];
    exponentials(s, __uint_as_float(least) - fmaxf(base[0], base[1]));
}

__device__ __forceinline__ void multiply_scores(float (&s)[32], const u32 (&q)[32], u32 k) {
    products_begin();
    multiply(s, q, descriptor(k, false));
    products_end();
}

// o, the last columns of which are sums, continued from +0 or what it was.
__device__ __forceinline__ void multiply_values(float (&o)[68], const u32 (&p)[16], u32 v, bool keep) {
    const u64 rows = descriptor(v, true);
    products_begin();
#pragma unroll
    for (int g = 0; g < TILE / 16; ++g)
        values(o, p[4 * g], p[4 * g + 1], p[4 * g + 2], p[4 * g + 3], rows + g * (16 * LINE >> 4), g ? 1 : keep);
    products_end();
}

struct State {  // of two rows: maxima, sums, values
    float m[2], s[2], o[64];
};

// An earlier and a later range of keys. An empty one (m = -inf, s = o = 0) leaves the other's values alone. No FMA.
__device__ __forceinline__ void join(State& total, const float (&m)[2], const float (&o)[68]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float top = fmaxf(total.m[h], m[h]), base = top == MINUS_INFINITY ? 0.0f : top;
        const float first = exp2_kept(total.m[h] - base), second = exp2_kept(m[h] - base);
        total.m[h] = top;
        total.s[h] = total.s[h] * first + o[64 + 2 * h] * second;
#pragma unroll
        for (int i = 0; i < 64; ++i)
            if (i / 2 % 2 == h) total.o[i] = total.o[i] * first + o[i] * second;
    }
}

__device__ __forceinline__ void rescale(float (&o)[68], const float (&alpha)[2]) {
#pragma unroll
    for (int i = 0; i < 68; ++i)
        if (i != 65 && i != 67) o[i] = o[i] * alpha[i / 2 % 2];  // of equal columns of sums one is read
}

// a/b, correctly rounded, where neither it nor its steps leave the normal numbers; inverse: 1/b, correctly rounded.
__device__ __forceinline__ float quotient(float a, float b, float inverse) {
    float q = a * inverse;
    q = __fmaf_rn(__fmaf_rn(-b, q, a), inverse, q);
    return __fmaf_rn(__fmaf_rn(-b, q, a), inverse, q);
}

__device__ __noinline__ float divide(float a, float b) { return a / b; }

// out = bf16(o/s) and lse2 = m + log2 s. Adding +0 first makes a zero of either sign +0.
__device__ __forceinline__ void finish(const State& total, const Problem& p, const Work& work, int state, int heads, int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float s = total.s[h], inverse = 1.0f / s;
        float small = s, large = s;
        u32 words[16];
#pragma unroll
        for (int j = 0; j < 16; ++j) {
            const float x = fabsf(total.o[4 * j + 2 * h]), y = fabsf(total.o[4 * j + 2 * h + 1]);
            small = fminf(small, fminf(x, y)), large = fmaxf(large, fmaxf(x, y));
        }
        if (__all_sync(~0u, s >= 0.5f && small >= 0x1p-60f && large <= 0x1p60f)) {
#pragma unroll
            for (int j = 0; j < 16; ++j)
                words[j] = pack(quotient(total.o[4 * j + 2 * h], s, inverse), quotient(total.o[4 * j + 2 * h + 1], s, inverse));
        } else {
#pragma unroll
            for (int j = 0; j < 16; ++j)
                words[j] = rounded(divide(total.o[4 * j + 2 * h] + 0.0f, s), divide(total.o[4 * j + 2 * h + 1] + 0.0f, s));
        }
        const int at = (state + 8 * h) / GROUP;
        const long long row = (long long)(work.row + at) * heads + work.kv_head * GROUP + (state + 8 * h) % GROUP;
        const bool real = at < work.rows;
        if (real && lane % 4 == 0) p.lse2[row] = total.m[h] + log2f(s);
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
            u32 x[4] = {words[j], words[j + 1], words[j + 2], words[j + 3]};
            transpose(x, lane);
            if (real) *(uint4*)(p.out + row * DIM + 8 * (j + lane % 4)) = make_uint4(x[0], x[1], x[2], x[3]);
        }
    }
}

struct Shared {  // addresses; of a ring: of its first
    u32 q, k, v, q_full, q_free, k_full, k_free, v_full, v_free;
};

__device__ __forceinline__ void produce(const TensorMap& q, const TensorMap& k, const TensorMap& v, const Problem& p, const Queue& queue,
                                        const Shared& at, Work* told, int lane) {
    Ring ring;
    Work w;
    u32 q_phase = 1;
    while (take<STEP, true>(queue, lane, w)) {
        w.tiles = (w.position + min(STEP, w.rows) + TILE - 1) / TILE;
        for (int tile = 0; tile < w.tiles; ++tile, ring.next()) {
            const int low = tile * TILE;
            barrier_wait(at.k_free + 8 * ring.stage, ring.phase ^ 1);
            load_rows(k, p.k, w.kv_head, w.first + low, w.length - low, at.k + ring.stage * K_BYTES, at.k_full + 8 * ring.stage, lane);
            if (tile == 0) {
                barrier_wait(at.q_free, q_phase);
                q_phase ^= 1;
                if (lane == 0) {
                    tell(told, w);
                    barrier_expect(at.q_full, Q_BYTES);
                    load_states(q, w, at.q, at.q_full);
                }
                __syncwarp();
            }
            barrier_wait(at.v_free + 8 * ring.stage, ring.phase ^ 1);
            load_rows(v, p.v, w.kv_head, w.first + low, w.length - low, at.v + ring.stage * V_BYTES, at.v_full + 8 * ring.stage, lane);
        }
    }
    barrier_wait(at.q_free, q_phase);
    if (lane == 0) leave(queue, told, at.q_full);
}

// The block's work until none is left, for one of its halves.
__device__ __forceinline__ void consume(const Problem& p, int heads, const Shared& at, const Work* told, int half, int lane) {
    const int warp = threadIdx.x % 128 / 32, state = half * 64 + warp * 16 + lane / 4;
    const bool first_lane = lane == 0;
    Ring ring;  // of keys; the values are one tile behind
    float s[32], o[68];
    u32 q[32], w[16], q_phase = 0;
    State total;
    for (;;) {
        barrier_wait(at.q_full, q_phase);
        q_phase ^= 1;
        const Work work = *told;
        if (!work.tiles) return;
        hold(q, at.q + half * 2 * CHUNK + warp * 16 * LINE, lane);
        held(at.q_free);
        const int position[2] = {work.position + state / GROUP, work.position + (state + 8) / GROUP};
        const int plain = (work.position + 1) / TILE * TILE;  // end of the tiles that every row sees whole
        float m[2] = {MINUS_INFINITY, MINUS_INFINITY}, alpha[2];
#pragma unroll
        for (int i = 0; i < 64; ++i) total.o[i] = 0.0f;
#pragma unroll
        for (int h = 0; h < 2; ++h) total.m[h] = MINUS_INFINITY, total.s[h] = 0.0f;

        barrier_wait(at.k_full + 8 * ring.stage, ring.phase);
        multiply_scores(s, q, at.k + ring.stage * K_BYTES);
        await_products<0>();
        pin(s);
        if (first_lane) barrier_arrive(at.k_free + 8 * ring.stage);
        softmax(s, m, alpha, p.c, 0, position, plain <= 0, lane);
#pragma unroll
        for (int i = 0; i < 16; ++i) w[i] = pack(s[2 * i], s[2 * i + 1]);
        bool fresh = true;  // o starts from +0
        int split = 1;      // tiles since the last restart
        Ring last = ring;
        ring.next();
#pragma unroll 1
        for (int tile = 1; tile < work.tiles; ++tile) {
            barrier_wait(at.k_full + 8 * ring.stage, ring.phase);
            multiply_scores(s, q, at.k + ring.stage * K_BYTES);
            if (!fresh) rescale(o, alpha);
            barrier_wait(at.v_full + 8 * last.stage, last.phase);
            multiply_values(o, w, at.v + last.stage * V_BYTES, !fresh);
            await_products<1>();
            pin(s);
            if (first_lane) barrier_arrive(at.k_free + 8 * ring.stage);
            fresh = split == p.split_tiles;
            const float before[2] = {m[0], m[1]};
            if (fresh) m[0] = MINUS_INFINITY, m[1] = MINUS_INFINITY;
            softmax(s, m, alpha, p.c, tile * TILE, position, tile * TILE >= plain, lane);
            pin(s);
            await_products<0>();
            pin(o);
            if (first_lane) barrier_arrive(at.v_free + 8 * last.stage);
#pragma unroll
            for (int i = 0; i < 16; ++i) w[i] = pack(s[2 * i], s[2 * i + 1]);
            if (fresh) join(total, before, o), split = 0;
            ++split;
            last = ring;
            ring.next();
        }
        if (!fresh) rescale(o, alpha);
        barrier_wait(at.v_full + 8 * last.stage, last.phase);
        multiply_values(o, w, at.v + last.stage * V_BYTES, !fresh);
        await_products<0>();
        pin(o);
        if (first_lane) barrier_arrive(at.v_free + 8 * last.stage);
        join(total, m, o);
        finish(total, p, work, state, heads, lane);
    }
}

// out [rows, heads, 128] and lse2 [rows, heads].
extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_forward_sm90(
    const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap k, const __grid_constant__ TensorMap v, const Queue queue,
    const Problem p) {
    extern __shared__ unsigned char dynamic[];
    __shared__ alignas(8) u64 barriers[4 * STAGES + 2];
    __shared__ Work told;
    Shared at;
    at.q = (address(dynamic) + 1023) & ~1023u, at.k = at.q + Q_BYTES, at.v = at.k + STAGES * K_BYTES;
    at.q_full = address(barriers), at.q_free = at.q_full + 8, at.k_full = at.q_free + 8, at.k_free = at.k_full + 8 * STAGES;
    at.v_full = at.k_free + 8 * STAGES, at.v_free = at.v_full + 8 * STAGES;
    if (threadIdx.x == 0) {
        barrier_init(at.q_full, 1), barrier_init(at.q_free, 32 * WARPS);
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(at.k_full + 8 * s, 1), barrier_init(at.k_free + 8 * s, WARPS);
            barrier_init(at.v_full + 8 * s, 1), barrier_init(at.v_free + 8 * s, WARPS);
        }
        barriers_ready();
    }
    for (int i = threadIdx.x; i < STAGES * CHUNK / 16; i += THREADS) {  // the columns of ones
        const u32 to = at.v + i / (CHUNK / 16) * V_BYTES + 2 * CHUNK + i % (CHUNK / 16) * 16, ones = 0x3F803F80u;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(ones) : "memory");
    }
    shared_written();
    __syncthreads();
    const int lane = threadIdx.x % 32, part = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (part == 2) {
        copies();
        if (threadIdx.x < 288) produce(q, k, v, p, queue, at, &told, lane);
    } else {
        multiplies();
        consume(p, queue.kv_heads * GROUP, at, &told, part, lane);
    }
}
