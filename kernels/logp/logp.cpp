// Log-probability of one selected column per row, and its gradient. Order: the contract's "Logprob".
#include <vector>

#include "lse.h"

using namespace rlk;

// State of columns begin … end-1 of one shard of a row: tiles of `tile` from `begin`, merged ascending. scratch holds a tile's power of two.
static LseState shard_state(const float* z, const uint8_t* on, float t, int64_t begin, int64_t end, int64_t tile, float* scratch) {
  LseState state;
  for (; begin < end; begin += tile) {
    const int64_t n = std::min(tile, end - begin);
    if (on)
      for (int64_t i = 0; i < n; ++i) scratch[i] = on[begin + i] ? z[begin + i] / t : kNegativeInfinity;
    else
      for (int64_t i = 0; i < n; ++i) scratch[i] = z[begin + i] / t;
    state = merge(state, tile_state(scratch, n));
  }
  return state;
}

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
        const int64_t first = s * shard_width, end = std::min(first + shard_width, limit);
        states[r * shards + s] = shard_state(z, on, temperature[r], first, end, tile, scratch.data());
      }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const bool scored = !active || active[r];
    lse[r] = scored ? lse_of(merge_shards(states.data() + r * shards, shards)) : 0.0f;
    logp[r] = scored ? logits[r * width + ids[r]] / temperature[r] - lse[r] : 0.0f;
  }
}

// What a rank adds that holds `shards` adjacent shards of shard_width columns, the first `limit` of them real: part[r] = {max, sum, z/T of
// the selected column}, the state at the root of its subtree. ids count from the rank's first column; a selected column elsewhere gives +0.
void logp_part(const float* logits, const int64_t* ids, const float* temperature, const uint8_t* support, const uint8_t* active,
               float* part, int64_t rows, int64_t limit, int64_t shard_width, int64_t shards, int64_t tile) {
  const int64_t width = shards * shard_width;
#pragma omp parallel
  {
    std::vector<float> scratch(next_power_of_two(std::min(tile, shard_width)));
    std::vector<LseState> states(shards);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      float* out = part + 3 * r;
      out[0] = out[1] = out[2] = 0.0f;
      if (active && !active[r]) continue;
      const float* z = logits + r * width;
      const uint8_t* on = support ? support + r * width : nullptr;
      const float t = temperature[r];
      for (int64_t s = 0; s < shards; ++s)
        states[s] = shard_state(z, on, t, s * shard_width, std::min((s + 1) * shard_width, limit), tile, scratch.data());
      const LseState root = merge_shards(states.data(), shards);
      out[0] = root.max;
      out[1] = root.sum;
      if (ids[r] >= 0 && ids[r] < width) out[2] = z[ids[r]] / t;
    }
  }
}

// Joins the parts [ranks, rows] of all ranks, rank_width columns each: the tree of adjacent pairs goes on over ranks.
void logp_join(const float* parts, const int64_t* ids, const uint8_t* active, float* logp, float* lse, int64_t ranks, int64_t rows,
               int64_t rank_width) {
  std::vector<LseState> states(ranks);
  for (int64_t r = 0; r < rows; ++r) {
    logp[r] = lse[r] = 0.0f;
    if (active && !active[r]) continue;
    for (int64_t k = 0; k < ranks; ++k) {
      const float* part = parts + 3 * (k * rows + r);
      states[k] = {part[0], part[1]};
    }
    lse[r] = lse_of(merge_shards(states.data(), ranks));
    logp[r] = parts[3 * (ids[r] / rank_width * rows + r) + 2] - lse[r];
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
