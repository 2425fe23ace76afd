// Embedding rows are copied, never summed, so that −0 stays −0. The weight gradient adds per id in leaf order.
#include <vector>

#include "numerics.h"

using namespace rlk;

extern "C" {

// y[t] = weight[ids[t]]; rows of `width` bf16.
void embedding_forward(const int64_t* ids, const uint16_t* weight, uint16_t* y, int64_t tokens, int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t t = 0; t < tokens; ++t) std::memcpy(y + t * width, weight + ids[t] * width, width * sizeof(uint16_t));
}

// Run u holds the entries begin[u] … begin[u+1) of one id, in leaf order: entry e is token row token[e] in leaf[e].
// dweight[id[u]] = pair tree over leaves of (from +0, the run's dy rows of that leaf ascending), fp32. Other rows of dweight are untouched.
void embedding_weight_grad(const int64_t* id, const int64_t* begin, const int64_t* token, const int64_t* leaf, const uint16_t* dy,
                           float* dweight, int64_t runs, int64_t leaves, int64_t width) {
#pragma omp parallel
  {
    std::vector<float> acc(leaves * width);
#pragma omp for schedule(dynamic, 16)
    for (int64_t u = 0; u < runs; ++u) {
      std::fill(acc.begin(), acc.end(), 0.0f);
      for (int64_t e = begin[u]; e < begin[u + 1]; ++e) {
        float* to = acc.data() + leaf[e] * width;
        const uint16_t* from = dy + token[e] * width;
        for (int64_t i = 0; i < width; ++i) to[i] += from_bf16(from[i]);
      }
      for (int64_t i = 0; i < width; ++i) dweight[id[u] * width + i] = pair_tree_sum(acc.data() + i, leaves, width);
    }
  }
}
}
