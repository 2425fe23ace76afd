// out[m, n] = Σ_k a[m, k]·b[n, k] in plain, split or token order; the one contraction behind forward, input gradient and weight gradient.
#include <vector>

#include "numerics.h"

using namespace rlk;

extern "C" {

// Element (row, k) of an operand lies at row·row_stride + k·k_stride. Leaf l is the positions [offsets[l], offsets[l+1]), or one of `leaves`
// equal pieces of k when offsets is null; position p means k = index[p] (−1: +0), or k = p when index is null.
void det_gemm(const uint16_t* a, int64_t a_row, int64_t a_k, const uint16_t* b, int64_t b_row, int64_t b_k, const int64_t* index,
              const int64_t* offsets, int64_t leaves, void* out, int64_t out_is_bf16, int64_t m, int64_t n, int64_t k) {
#pragma omp parallel
  {
    std::vector<float> parts(leaves);
#pragma omp for schedule(static) collapse(2)
    for (int64_t r = 0; r < m; ++r)
      for (int64_t c = 0; c < n; ++c) {
        for (int64_t l = 0; l < leaves; ++l) {
          const int64_t first = offsets ? offsets[l] : l * (k / leaves), last = offsets ? offsets[l + 1] : first + k / leaves;
          float acc = 0.0f;
          for (int64_t p = first; p < last; p += kGroup) {
            float x[kGroup] = {}, y[kGroup] = {};
            for (int64_t i = 0; i < std::min(kGroup, last - p); ++i) {
              const int64_t at = index ? index[p + i] : p + i;
              if (at < 0) continue;
              x[i] = from_bf16(a[r * a_row + at * a_k]);
              y[i] = from_bf16(b[c * b_row + at * b_k]);
            }
            acc += group_dot(x, y);
          }
          parts[l] = acc;
        }
        const float value = pair_tree_sum(parts.data(), leaves);
        if (out_is_bf16)
          static_cast<uint16_t*>(out)[r * n + c] = to_bf16(value);
        else
          static_cast<float*>(out)[r * n + c] = value;
      }
  }
}
}
