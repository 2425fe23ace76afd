// What lies between the two matrix products of batch_invariant_logp: tiles of logits folded into states, and slopes of tiles of logits.
// States, merges and slopes are those of logp (lse.h); a tile of logits here is a tile of logp's, so that the bytes are the same.
#include <vector>

#include "lse.h"

using namespace rlk;

extern "C" {

// Folds one tile into states[row·shards + shard]. tile: [rows, n] logits of columns first … first+n, all of them real; support: null, or
// rows of `width` bytes; active: null (all) or [rows]; selected[row] receives the logit of the row's id if it lies in the tile.
void fold_tile(const float* tile, const int64_t* ids, const float* temperature, const uint8_t* support, const uint8_t* active, float* states,
               float* selected, int64_t rows, int64_t n, int64_t first, int64_t width, int64_t shard, int64_t shards) {
  LseState* all = reinterpret_cast<LseState*>(states);
#pragma omp parallel
  {
    std::vector<float> scratch(next_power_of_two(n));
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; ++r) {
      if (active && !active[r]) continue;
      const float* z = tile + r * n;
      const uint8_t* on = support ? support + r * width + first : nullptr;
      const float t = temperature[r];
      if (on)
        for (int64_t i = 0; i < n; ++i) scratch[i] = on[i] ? z[i] / t : kNegativeInfinity;
      else
        for (int64_t i = 0; i < n; ++i) scratch[i] = z[i] / t;
      LseState& state = all[r * shards + shard];
      state = merge(state, tile_state(scratch.data(), n));
      if (ids[r] >= first && ids[r] < first + n) selected[r] = z[ids[r] - first];
    }
  }
}

// logp = selected/T − LSE of every row; +0 in inactive rows. Overwrites states [rows, shards].
void finish(float* states, const float* selected, const float* temperature, const uint8_t* active, float* logp, float* lse, int64_t rows,
            int64_t shards) {
  for (int64_t r = 0; r < rows; ++r) {
    const bool scored = !active || active[r];
    lse[r] = scored ? lse_of(merge_shards(reinterpret_cast<LseState*>(states) + r * shards, shards)) : 0.0f;
    logp[r] = scored ? selected[r] / temperature[r] - lse[r] : 0.0f;
  }
}

// dlogits: [rows, n] bf16 of a tile of logits of real columns first … first+n; +0 off the support and in inactive rows.
void slopes(const float* tile, const int64_t* ids, const float* temperature, const uint8_t* support, const uint8_t* active, const float* lse,
            const float* seed, uint16_t* dlogits, int64_t rows, int64_t n, int64_t first, int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    const float* z = tile + r * n;
    const uint8_t* on = support ? support + r * width + first : nullptr;
    uint16_t* dz = dlogits + r * n;
    if (active && !active[r]) {
      std::fill_n(dz, n, uint16_t(0));
      continue;
    }
    const float t = temperature[r], row_lse = lse[r], row_seed = seed[r];
    const int64_t hit = ids[r] - first;
    for (int64_t j = 0; j < n; ++j) dz[j] = logit_slope(z[j], t, row_lse, row_seed, j == hit);
    if (on)
      for (int64_t j = 0; j < n; ++j) dz[j] = on[j] ? dz[j] : uint16_t(0);
  }
}

// out[i] = bf16 of the pair tree over parts[s·size + i], s < shards. A NaN becomes the one that det_gemm stores.
void join_shards(float* parts, uint16_t* out, int64_t shards, int64_t size) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < size; ++i) {
    const float value = pair_tree_sum(parts + i, shards, size);
    out[i] = to_bf16(value != value ? from_bits(0x7fc00000u) : value);
  }
}
}
