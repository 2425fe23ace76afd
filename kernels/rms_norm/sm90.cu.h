// rms_norm of heads and gradients of wide rows on Hopper: the bytes of triton.py. norm_gradient and row_scales take one row a block,
// gain_leaves a leaf of tokens and 64 columns, norm_heads several heads of 128 a warp.
//
// Compiled with what rows.h wants, and WARPS (of gain_leaves).

#include "rows.h"

constexpr int TOKENS = 16;

struct Step {
    const unsigned *x, *gamma, *dy;
    unsigned* dx;
    float* scales;           // 1/sqrt(mean(x²) + eps) of each row
    const long long *index, *offsets;
    float2* parts;           // [leaves, WIDTH]
    unsigned* y;
    long long token_stride, head_stride;  // pairs
    float eps;
    int rows, heads;         // of norm_heads: row r is head r % heads of token r / heads
};

extern "C" __global__ void __launch_bounds__(THREADS) norm_gradient(const Step step) {
    SHARED(parts);
    const long long row = (long long)blockIdx.x * (WIDTH / 2);
    unsigned value[PAIRS], grad[PAIRS], gamma[PAIRS];
    take_row(value, step.x + row);
    take_row(grad, step.dy + row);
    take_row(gamma, step.gamma);
    const float scale = row_scale(value, step.eps, parts);
    float2 sums[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) sums[i] = times(times(values(gamma[i]), values(grad[i])), times(values(value[i]), scale));
    const float mean = row_mean(sums, parts + THREADS);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = threadIdx.x + THREADS * i;
        const float2 scaled = times(values(gamma[i]), values(grad[i])), hat = times(times(values(value[i]), scale), mean);
        if (2 * pair < WIDTH)
            step.dx[row + pair] = rounded(__fmul_rn(scale, __fsub_rn(scaled.x, hat.x)), __fmul_rn(scale, __fsub_rn(scaled.y, hat.y)));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) row_scales(const Step step) {
    SHARED(parts);
    unsigned value[PAIRS];
    take_row(value, step.x + (long long)blockIdx.x * (WIDTH / 2));
    const float scale = row_scale(value, step.eps, parts);
    if (threadIdx.x == 0) step.scales[blockIdx.x] = scale;
}

// parts[leaf], 64 columns of it: from +0, the groups of 16 tokens ascending, each by its row tree. A group is a warp's; one warp adds them.
extern "C" __global__ void __launch_bounds__(32 * WARPS) gain_leaves(const Step step) {
    SHARED(groups);  // twice, of each warp
    constexpr int ACROSS = (WIDTH + 63) / 64;
    const int leaf = blockIdx.x / ACROSS, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int pair = blockIdx.x % ACROSS * 32 + lane;
    const bool inside = 2 * pair < WIDTH;
    const long long first = step.offsets[leaf], last = step.offsets[leaf + 1];
    float2 total = make_float2(0.0f, 0.0f);
    int turn = 0;
    for (long long start = first; start < last; start += TOKENS * WARPS, turn ^= 1) {
        const long long mine = start + TOKENS * warp + lane;
        long long token = lane < TOKENS && mine < last ? step.index[mine] : -1;
        const float scale = token < 0 ? 0.0f : step.scales[token];
        unsigned value[TOKENS], grad[TOKENS];
        float2 sums[TOKENS];
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {
            const long long here = __shfl_sync(~0u, token, t);
            const bool real = inside && here >= 0;
            value[t] = real ? step.x[here * (WIDTH / 2) + pair] : 0;
            grad[t] = real ? step.dy[here * (WIDTH / 2) + pair] : 0;
        }
#pragma unroll
        for (int t = 0; t < TOKENS; ++t) {  // fill gives +0
            const float2 hat = times(values(value[t]), __shfl_sync(~0u, scale, t));
            sums[t] = times(values(grad[t]), values(rounded(hat.x, hat.y)));
        }
        fold<TOKENS>(sums);
        groups[(turn * WARPS + warp) * 32 + lane] = sums[0];
        __syncthreads();
        if (warp == 0)
            for (int w = 0; w < WARPS && start + TOKENS * w < last; ++w) total = plus(total, groups[(turn * WARPS + w) * 32 + lane]);
    }
    if (warp == 0 && inside) step.parts[leaf * (WIDTH / 2) + pair] = total;
}

// A head of 128 is 16 lanes': lane l holds the pairs l + 16·i. A warp takes two heads side by side, AHEAD times.
extern "C" __global__ void __launch_bounds__(THREADS) norm_heads(const Step step) {
    constexpr int HELD = 4, AHEAD = 4;
    const int lane = threadIdx.x % 16, first = (blockIdx.x * (THREADS / 32) + threadIdx.x / 32) * 2 * AHEAD + threadIdx.x / 16 % 2;
    unsigned gamma[HELD], value[AHEAD][HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) gamma[i] = step.gamma[lane + 16 * i];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int row = first + 2 * a;
        const unsigned* x = step.x + row / step.heads * step.token_stride + row % step.heads * step.head_stride;
#pragma unroll
        for (int i = 0; i < HELD; ++i) value[a][i] = row < step.rows ? x[lane + 16 * i] : 0;
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
        const int row = first + 2 * a;
        float2 sums[HELD];
#pragma unroll
        for (int i = 0; i < HELD; ++i) sums[i] = times(values(value[a][i]), values(value[a][i]));
        fold<HELD>(sums);
        float2 sum = sums[0];
#pragma unroll
        for (int other = 8; other; other /= 2)
            sum = plus(sum, make_float2(__shfl_xor_sync(~0u, sum.x, other), __shfl_xor_sync(~0u, sum.y, other)));
        const float mean = __fdiv_rn(__fadd_rn(sum.x, sum.y), 128.0f);
        const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, step.eps)));
#pragma unroll
        for (int i = 0; i < HELD; ++i) {
            const float2 hat = times(values(value[a][i]), scale);
            const float2 normed = times(values(rounded(hat.x, hat.y)), values(gamma[i]));
            if (row < step.rows) step.y[(long long)row * 64 + lane + 16 * i] = rounded(normed.x, normed.y);
        }
    }
}
