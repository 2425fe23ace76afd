// A row of bf16 values in a block of THREADS threads. Thread t holds the pairs of columns t + THREADS·i, so that the first levels of a row
// tree, which join halves of the row, need no other thread; the next ones join warps through shared memory, then lanes, then the two
// columns of a pair. Compiled with WIDTH (even), BLOCK (the power of two from WIDTH on) and THREADS.

constexpr int PAIRS = BLOCK / 2 / THREADS, ROW_WARPS = THREADS / 32;

#ifndef EMULATED
#define SHARED(name) extern __shared__ float2 name[]

// Two values rounded to nearest even, the first in the lower half.
__device__ __forceinline__ unsigned rounded(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
#endif

__device__ __forceinline__ float2 values(unsigned pair) {
    return make_float2(__int_as_float(pair << 16), __int_as_float(pair & 0xffff0000u));
}
__device__ __forceinline__ float2 plus(float2 a, float2 b) { return make_float2(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y)); }
__device__ __forceinline__ float2 times(float2 a, float2 b) { return make_float2(__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y)); }
__device__ __forceinline__ float2 times(float2 a, float b) { return make_float2(__fmul_rn(a.x, b), __fmul_rn(a.y, b)); }

// Of the first COUNT sums, halves onto halves until one is left, in sums[0].
template <int COUNT, int SIZE> __device__ __forceinline__ void fold(float2 (&sums)[SIZE]) {
    if constexpr (COUNT > 1) {
#pragma unroll
        for (int i = 0; i < COUNT / 2; ++i) sums[i] = plus(sums[i], sums[i + COUNT / 2]);
        fold<COUNT / 2>(sums);
    }
}

// Mean of a row by its tree, in every thread. parts: THREADS sums, not in use.
__device__ __forceinline__ float row_mean(float2 (&sums)[PAIRS], float2* parts) {
    const int thread = threadIdx.x, lane = thread % 32;
    fold<PAIRS>(sums);
    parts[thread] = sums[0];
    __syncthreads();
    float2 of_warp[ROW_WARPS];
#pragma unroll
    for (int warp = 0; warp < ROW_WARPS; ++warp) of_warp[warp] = parts[32 * warp + lane];
    fold<ROW_WARPS>(of_warp);
    float2 sum = of_warp[0];
#pragma unroll
    for (int other = 16; other; other /= 2)
        sum = plus(sum, make_float2(__shfl_xor_sync(~0u, sum.x, other), __shfl_xor_sync(~0u, sum.y, other)));
    return __fdiv_rn(__fadd_rn(sum.x, sum.y), (float)WIDTH);
}

__device__ __forceinline__ float row_scale(const unsigned (&value)[PAIRS], float eps, float2* parts) {
    float2 sums[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) sums[i] = times(values(value[i]), values(value[i]));
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(row_mean(sums, parts), eps)));
}

__device__ __forceinline__ void take_row(unsigned (&to)[PAIRS], const unsigned* from) {
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = threadIdx.x + THREADS * i;
        to[i] = 2 * pair < WIDTH ? from[pair] : 0;
    }
}
