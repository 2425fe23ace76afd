// RMSNorm over the last dimension. Row sums are row trees; x̂ is normalised in fp32, cast to bf16, then multiplied by gamma.
#include <vector>

#include "numerics.h"

using namespace rlk;

static float rstd_of(const uint16_t* x, float* scratch, int64_t width, float eps) {
  for (int64_t i = 0; i < width; ++i) {
    const float v = from_bf16(x[i]);
    scratch[i] = v * v;
  }
  const float mean = row_tree_sum(scratch, width) / float(width);
  return 1.0f / std::sqrt(mean + eps);
}

extern "C" {

// x, y: [rows, width] bf16; gamma: [width] bf16.
void rms_norm_forward(const uint16_t* x, const uint16_t* gamma, uint16_t* y, int64_t rows, int64_t width, float eps) {
#pragma omp parallel
  {
    std::vector<float> scratch(next_power_of_two(width));
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t* xr = x + r * width;
      const float rstd = rstd_of(xr, scratch.data(), width, eps);
      for (int64_t i = 0; i < width; ++i) {
        const float normed = from_bf16(to_bf16(from_bf16(xr[i]) * rstd));
        y[r * width + i] = to_bf16(normed * from_bf16(gamma[i]));
      }
    }
  }
}

// dx = rstd·(γ·dy − x̂·Σ(γ·dy·x̂)/width), one rounding; x̂ is the fp32 value.
void rms_norm_backward(const uint16_t* x, const uint16_t* gamma, const uint16_t* dy, uint16_t* dx, int64_t rows, int64_t width, float eps) {
#pragma omp parallel
  {
    std::vector<float> scratch(next_power_of_two(width));
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      const uint16_t *xr = x + r * width, *dyr = dy + r * width;
      const float rstd = rstd_of(xr, scratch.data(), width, eps);
      for (int64_t i = 0; i < width; ++i) {
        const float x_hat = from_bf16(xr[i]) * rstd;
        scratch[i] = from_bf16(gamma[i]) * from_bf16(dyr[i]) * x_hat;
      }
      const float mean = row_tree_sum(scratch.data(), width) / float(width);
      for (int64_t i = 0; i < width; ++i) {
        const float x_hat = from_bf16(xr[i]) * rstd;
        dx[r * width + i] = to_bf16(rstd * (from_bf16(gamma[i]) * from_bf16(dyr[i]) - x_hat * mean));
      }
    }
  }
}

// roots[s, i] = Σ dy·bf16(x̂) of shard s in token order: leaf l adds, from +0 and ascending, the rows index[offsets[l] … offsets[l+1]) in
// groups of 16 (row −1 is fill, +0); leaves are joined by the tree of adjacent pairs. Each row of x holds `heads` vectors of `width`;
// shard s takes its heads/shards of them in ascending order before the next row.
void rms_norm_gamma_grad(const uint16_t* x, const uint16_t* dy, const int64_t* index, const int64_t* offsets, float* roots, int64_t leaves,
                         int64_t heads, int64_t shards, int64_t width, float eps) {
  const int64_t per_shard = heads / shards;
  std::vector<float> acc(shards * leaves * width, 0.0f);
#pragma omp parallel
  {
    std::vector<float> scratch(next_power_of_two(width)), group(kGroup * width);
#pragma omp for schedule(static) collapse(2)
    for (int64_t s = 0; s < shards; ++s)
      for (int64_t l = 0; l < leaves; ++l) {
        float* out = acc.data() + (s * leaves + l) * width;
        int64_t filled = 0;
        auto flush = [&]() {
          if (!filled) return;
          std::fill(group.begin() + filled * width, group.end(), 0.0f);
          for (int64_t half = kGroup / 2 * width; half >= width; half /= 2)
            for (int64_t i = 0; i < half; ++i) group[i] += group[i + half];
          for (int64_t i = 0; i < width; ++i) out[i] += group[i];
          filled = 0;
        };
        for (int64_t t = offsets[l]; t < offsets[l + 1]; ++t)
          for (int64_t h = s * per_shard; h < (s + 1) * per_shard; ++h) {
            float* slot = group.data() + filled * width;
            if (index[t] < 0) {
              std::fill(slot, slot + width, 0.0f);
            } else {
              const int64_t at = (index[t] * heads + h) * width;
              const float rstd = rstd_of(x + at, scratch.data(), width, eps);
              for (int64_t i = 0; i < width; ++i) slot[i] = from_bf16(dy[at + i]) * from_bf16(to_bf16(from_bf16(x[at + i]) * rstd));
            }
            if (++filled == kGroup) flush();
          }
        flush();
      }
  }
  for (int64_t s = 0; s < shards; ++s)
    for (int64_t i = 0; i < width; ++i) roots[s * width + i] = pair_tree_sum(acc.data() + s * leaves * width + i, leaves, width);
}
}
