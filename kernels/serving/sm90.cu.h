// (bf16(x + y), rms_norm of it) on Hopper: the bytes of _add_norm in triton.py, one row a block.
//
// Compiled with WIDTH (even), BLOCK (the power of two from WIDTH on) and THREADS. Thread t holds the pairs of columns t + THREADS·i, so
// that the first levels of the row tree, which join halves of the row, need no other thread; the next ones join warps through shared
// memory, then lanes, then the two columns of a pair.

constexpr int PAIRS = BLOCK / 2 / THREADS, WARPS = THREADS / 32;

struct Step {
    const unsigned *x, *y, *gamma;
    unsigned *total, *normed;
    float eps;
};

#ifndef EMULATED
#define SHARED(name) extern __shared__ float2 name[]

// Two values rounded to nearest even, the first in the lower half.
__device__ __forceinline__ unsigned rounded(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// Lets the next launch begin, and waits for the one before, where launches overlap.
__device__ __forceinline__ void tell_the_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_the_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

__device__ __forceinline__ float first(unsigned pair) { return __int_as_float(pair << 16); }
__device__ __forceinline__ float second(unsigned pair) { return __int_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float2 plus(float2 a, float2 b) { return make_float2(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y)); }

extern "C" __global__ void __launch_bounds__(THREADS) add_norm(const Step step) {
    SHARED(parts);  // of each warp, the sums of its lanes
    tell_the_next();
    const int thread = threadIdx.x, lane = thread % 32;
    const long long row = (long long)blockIdx.x * (WIDTH / 2);
    unsigned value[PAIRS], gamma[PAIRS];
    float2 sums[PAIRS];
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = thread + THREADS * i;
        gamma[i] = 2 * pair < WIDTH ? step.gamma[pair] : 0;  // a weight, which no launch before writes
    }
    wait_for_the_last();
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = thread + THREADS * i;
        const bool inside = 2 * pair < WIDTH;
        const unsigned x = inside ? step.x[row + pair] : 0, y = inside ? step.y[row + pair] : 0;
        value[i] = rounded(__fadd_rn(first(x), first(y)), __fadd_rn(second(x), second(y)));
        sums[i] = make_float2(__fmul_rn(first(value[i]), first(value[i])), __fmul_rn(second(value[i]), second(value[i])));
    }
#pragma unroll
    for (int half = PAIRS / 2; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) sums[i] = plus(sums[i], sums[i + half]);
    parts[thread] = sums[0];
    __syncthreads();
    float2 part[WARPS];
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) part[warp] = parts[32 * warp + lane];
#pragma unroll
    for (int half = WARPS / 2; half; half /= 2)
#pragma unroll
        for (int i = 0; i < half; ++i) part[i] = plus(part[i], part[i + half]);
    float2 sum = part[0];
#pragma unroll
    for (int other = 16; other; other /= 2)
        sum = plus(sum, make_float2(__shfl_xor_sync(~0u, sum.x, other), __shfl_xor_sync(~0u, sum.y, other)));
    const float mean = __fdiv_rn(__fadd_rn(sum.x, sum.y), (float)WIDTH);
    const float scale = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(mean, step.eps)));
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = thread + THREADS * i;
        if (2 * pair >= WIDTH) continue;
        const unsigned scaled = rounded(__fmul_rn(first(value[i]), scale), __fmul_rn(second(value[i]), scale));
        step.total[row + pair] = value[i];
        step.normed[row + pair] = rounded(__fmul_rn(first(scaled), first(gamma[i])), __fmul_rn(second(scaled), second(gamma[i])));
    }
}
