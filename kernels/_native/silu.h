// silu and its slope in fp32, shared by silu and swiglu. The order of operations is part of the contract.
#pragma once
#include "numerics.h"

namespace rlk {

inline float silu(float g) { return g / (1.0f + exp_(-g)); }

// d silu / dg = σ·(1 + g·(1 − σ)) with σ = 1/(1 + exp(−g)).
inline float silu_slope(float g) {
  const float sigma = 1.0f / (1.0f + exp_(-g));
  return sigma * (1.0f + g * (1.0f - sigma));
}

}  // namespace rlk
