// The gradients of rms_norm for Hopper on a processor. Compiled with the kernels' own definitions.

#define CLUSTER 1
#include "emulated_bf16.h"

#undef SHARED
#define SHARED(name) float2* name = (float2*)emulated_shared()

#include SOURCE

static_assert(THREADS == 32 * WARPS, "one number of fibers serves every kernel");

static Step step;

extern "C" void gradient(const Step* given, int rows) {
    step = *given;
    emulated::launch(rows, [] { norm_gradient(step); });
}

extern "C" void heads(const Step* given, int blocks) {
    step = *given;
    emulated::launch(blocks, [] { norm_heads(step); });
}

extern "C" void gains(const Step* given, int rows, int leaves) {
    step = *given;
    emulated::launch(rows, [] { row_scales(step); });
    emulated::launch(leaves * ((WIDTH + 63) / 64), [] { gain_leaves(step); });
}
