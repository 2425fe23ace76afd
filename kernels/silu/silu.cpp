// silu(x) = x/(1 + exp(−x)) per element: fp32, one rounding to bf16.
#include "silu.h"

using namespace rlk;

extern "C" {

void silu_forward(const uint16_t* x, uint16_t* y, int64_t count) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i) y[i] = to_bf16(silu(from_bf16(x[i])));
}

// dx = dy·slope(x).
void silu_backward(const uint16_t* x, const uint16_t* dy, uint16_t* dx, int64_t count) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i) dx[i] = to_bf16(from_bf16(dy[i]) * silu_slope(from_bf16(x[i])));
}
}
