// Rotary position embedding, half-split (NeoX) pairing: element i is rotated with element i + dim/2.
// fp32 products and sums without FMA, one rounding to bf16.
#include "numerics.h"

using namespace rlk;

extern "C" {

// table: [2, positions, half] fp32, cos then sin of position·inv_freq. The angle, cos and sin are fp64 values of one element each, rounded
// to fp32 once, so that neither the size of the table nor the number of threads can change a byte.
void rope_table(const double* inv_freq, float* table, int64_t positions, int64_t half) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < positions; ++t)
    for (int64_t i = 0; i < half; ++i) {
      const double angle = double(t) * inv_freq[i];
      table[t * half + i] = float(std::cos(angle));
      table[(positions + t) * half + i] = float(std::sin(angle));
    }
}

// x, y: [tokens, heads, 2·half] bf16; position[t] < positions. inverse = 0 rotates by θ, 1 by −θ:
//   first = x₁·cos − x₂·sin, second = x₂·cos + x₁·sin, with −sin in place of sin for the inverse.
void rope_apply(const uint16_t* x, const int64_t* position, const float* table, uint16_t* y, int64_t tokens, int64_t heads, int64_t half,
                int64_t positions, int64_t inverse) {
  const float sign = inverse ? -1.0f : 1.0f;
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    const float* cos_row = table + position[t] * half;
    const float* sin_row = cos_row + positions * half;
    for (int64_t h = 0; h < heads; ++h) {
      const uint16_t* from = x + (t * heads + h) * 2 * half;
      uint16_t* to = y + (t * heads + h) * 2 * half;
      for (int64_t i = 0; i < half; ++i) {
        const float c = cos_row[i], s = sign * sin_row[i];
        const float first = from_bf16(from[i]), second = from_bf16(from[i + half]);
        to[i] = to_bf16(first * c - second * s);
        to[i + half] = to_bf16(second * c + first * s);
      }
    }
  }
}
}
