// Log-probability of one selected column per row, and its gradient. Order: the contract's "Logprob".
#include <vector>

#include "lse.h"

using namespace rlk;

extern "C" {

// logits: [rows, width] fp32; ids: [rows]; temperature: [rows] fp32; support: [rows, width] or null (all); active: [rows] or null (all).
// Columns >= vocab or >= width are off the support; shard edges lie at multiples of padded/shards, tile edges at multiples of `tile` from
// the shard's first column. A (row, shard) is the unit of work, so that no number of threads can change a sum. Inactive rows give +0.
void logp_forward(const float* logits, const int64_t* ids, const float* temperature, const uint8_t* support, const uint8_t* active,
                  float* logp, float* lse, int64_t rows, int64_t width, int64_t vocab, int64_t padded, int64_t shards, int64_t tile) {
  const int64_t limit = std::min(width, vocab), shard_width = padded / shards;
  std::vector<LseState> states(rows * shards);
#pragma omp parallel
  {
    std::vector<float> scratch(next_power_of_two(std::min(tile, shard_width)));
#pragma omp for schedule(static) collapse(2)
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t s = 0; s < shards; ++s) {
        if (active && !active[r]) continue;
        const float* z = logits + r * width;
        const uint8_t* on = support ? support + r * width : nullptr;
        const float t = temperature[r];
        const int64_t end = std::min((s + 1) * shard_width, limit);
        LseState state;
        for (int64_t begin = s * shard_width; begin < end; begin += tile) {
          const int64_t n = std::min(tile, end - begin);
          if (on)
            for (int64_t i = 0; i < n; ++i) scratch[i] = on[begin + i] ? z[begin + i] / t : kNegativeInfinity;
          else
            for (int64_t i = 0; i < n; ++i) scratch[i] = z[begin + i] / t;
          state = merge(state, tile_state(scratch.data(), n));
        }
        states[r * shards + s] = state;
      }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const bool scored = !active || active[r];
    lse[r] = scored ? lse_of(merge_shards(states.data() + r * shards, shards)) : 0.0f;
    logp[r] = scored ? logits[r * width + ids[r]] / temperature[r] - lse[r] : 0.0f;
  }
}

// dlogits[j] = logit_slope widened to fp32. Off the support and in inactive rows +0.
void logp_backward(const float* logits, const int64_t* ids, const float* temperature, const uint8_t* support, const uint8_t* active,
                   const float* lse, const float* seed, float* dlogits, int64_t rows, int64_t width, int64_t vocab) {
  constexpr int64_t kChunk = 4096;  // elementwise: any cut gives the same bytes
  const int64_t limit = std::min(width, vocab);
#pragma omp parallel for schedule(static) collapse(2)
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t begin = 0; begin < width; begin += kChunk) {
      const int64_t end = std::min(begin + kChunk, width);
      const int64_t real = active && !active[r] ? begin : std::max(begin, std::min(end, limit));
      const float* z = logits + r * width;
      const uint8_t* on = support ? support + r * width : nullptr;
      float* dz = dlogits + r * width;
      const float t = temperature[r], row_lse = lse[r], row_seed = seed[r];
      for (int64_t j = begin; j < real; ++j) dz[j] = from_bf16(logit_slope(z[j], t, row_lse, row_seed, j == ids[r]));
      if (on)
        for (int64_t j = begin; j < real; ++j) dz[j] = on[j] ? dz[j] : 0.0f;
      for (int64_t j = real; j < end; ++j) dz[j] = 0.0f;
    }
}
}
