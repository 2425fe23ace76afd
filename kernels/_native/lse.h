// Streaming log-sum-exp of one row: the states and merges of the contract's "Logprob" order, shared by every path that needs an LSE.
#pragma once
#include "numerics.h"

namespace rlk {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// Columns seen so far: their maximum, and the sum of exp(value - maximum). max = -inf is the empty state: nothing with mass was seen.
struct LseState {
  float max = kNegativeInfinity;
  float sum = 0.0f;
};

// Maximum that lets NaN through, so that a NaN can never look like an empty state.
inline float nan_max(float a, float b) { return (a > b) | (a != a) ? a : b; }

// No FMA: both products are rounded before they are added. An empty state leaves the other's bytes alone (never exp(-inf + inf)).
inline LseState merge(LseState a, LseState b) {
  if (b.max == kNegativeInfinity) return a;
  if (a.max == kNegativeInfinity) return b;
  const float max = nan_max(a.max, b.max);
  const float left = a.sum * exp_(a.max - max), right = b.sum * exp_(b.max - max);
  return {max, left + right};
}

// State of one tile of n values; -inf stands for a column off the support (its term is +0). Overwrites `values`, which holds next_power_of_two(n).
inline LseState tile_state(float* values, int64_t n) {
  constexpr int64_t kLanes = 16;  // a maximum does not depend on its order; lanes let the loop vectorise
  float lanes[kLanes];
  for (float& lane : lanes) lane = kNegativeInfinity;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    for (int64_t j = 0; j < kLanes; ++j) lanes[j] = nan_max(lanes[j], values[i + j]);
  for (; i < n; ++i) lanes[0] = nan_max(lanes[0], values[i]);
  LseState state;
  for (float lane : lanes) state.max = nan_max(state.max, lane);
  if (state.max == kNegativeInfinity) return state;
  for (i = 0; i < n; ++i) values[i] = exp_(values[i] - state.max);
  state.sum = row_tree_sum(values, n);
  return state;
}

// Joins the states of `count` (a power of two) shards by the tree of adjacent pairs; overwrites them.
inline LseState merge_shards(LseState* states, int64_t count) {
  for (int64_t step = 1; step < count; step *= 2)
    for (int64_t i = 0; i + step < count; i += 2 * step) states[i] = merge(states[i], states[i + step]);
  return states[0];
}

inline float lse_of(LseState state) { return state.max + log_(state.sum); }

// seed·d logp/d z of one supported column: bf16((seed·([hit] − p))/T), p = exp(z/T − lse); each step rounds to fp32.
inline uint16_t logit_slope(float z, float t, float lse, float seed, bool hit) {
  const float p = exp_(z / t - lse);
  return to_bf16(seed * ((hit ? 1.0f : 0.0f) - p) / t);
}

}  // namespace rlk
