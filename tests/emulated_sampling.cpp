// The Hopper sampler on a processor. Compiled with the kernel's own definitions.

#include "emulated_cuda.h"

#include SOURCE

static Step step;

extern "C" void emulate(const Step* given, int rows) {
    step = *given;
    emulated::launch(rows, [] { sample(step); });
}
