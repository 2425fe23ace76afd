// (bf16(x + y), rms_norm of it) on Hopper: the bytes of _add_norm in triton.py, one row a block. Compiled with what rows.h wants.

#include "rows.h"

struct Step {
    const unsigned *x, *y, *gamma;
    unsigned *total, *normed;
    float eps;
};

#ifndef EMULATED
// Lets the next launch begin, and waits for the one before, where launches overlap.
__device__ __forceinline__ void tell_the_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_the_last() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

extern "C" __global__ void __launch_bounds__(THREADS) add_norm(const Step step) {
    SHARED(parts);
    tell_the_next();
    const long long row = (long long)blockIdx.x * (WIDTH / 2);
    unsigned value[PAIRS], added[PAIRS], gamma[PAIRS];
    take_row(gamma, step.gamma);  // a weight, which no launch before writes
    wait_for_the_last();
    take_row(value, step.x + row);
    take_row(added, step.y + row);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const float2 total = plus(values(value[i]), values(added[i]));
        value[i] = rounded(total.x, total.y);
    }
    const float scale = row_scale(value, step.eps, parts);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
        const int pair = threadIdx.x + THREADS * i;
        if (2 * pair >= WIDTH) continue;
        const float2 hat = times(values(value[i]), scale);
        const float2 normed = times(values(rounded(hat.x, hat.y)), values(gamma[i]));
        step.total[row + pair] = value[i];
        step.normed[row + pair] = rounded(normed.x, normed.y);
    }
}
