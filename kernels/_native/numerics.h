// Arithmetic shared by every CPU kernel. A formula that two paths share is one function here.
//
// Compiled with -ffp-contract=off: a fused multiply-add exists only where std::fma is written. Every function is branch-free or
// plain IEEE, so that its value does not depend on whether the compiler vectorises the loop around it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace rlk {

constexpr int64_t kGroup = 16;  // products added per accumulation step (mma_k)

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float from_bf16(uint16_t value) { return from_bits(uint32_t(value) << 16); }

// Round to nearest even; NaN stays NaN (quiet, sign kept).
inline uint16_t to_bf16(float value) {
  const uint32_t bits = to_bits(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x0040u;
  return uint16_t((bits & 0x7fffffffu) > 0x7f800000u ? quiet : rounded);
}

inline int64_t next_power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

// Row tree: n values in `scratch`, which holds next_power_of_two(n); filled with +0, the upper half is added to the lower until one is left.
inline float row_tree_sum(float* scratch, int64_t n) {
  int64_t width = next_power_of_two(n);
  for (int64_t i = n; i < width; ++i) scratch[i] = 0.0f;
  for (width /= 2; width >= 1; width /= 2)
    for (int64_t i = 0; i < width; ++i) scratch[i] += scratch[i + width];
  return scratch[0];
}

// Sum of one group of 16 products in the CPU backend's order: row tree, whose first level is a fused multiply-add
// (fma(a[i], b[i], a[i+8]*b[i+8])), then the upper half onto the lower.
inline float group_dot(const float* a, const float* b) {
  float t[8];
  for (int i = 0; i < 8; ++i) t[i] = std::fma(a[i], b[i], a[i + 8] * b[i + 8]);
  for (int i = 0; i < 4; ++i) t[i] += t[i + 4];
  for (int i = 0; i < 2; ++i) t[i] += t[i + 2];
  return t[0] + t[1];
}

// The balanced tree of adjacent pairs over `count` (a power of two) partial sums that lie `stride` floats apart; result in parts[0].
inline float pair_tree_sum(float* parts, int64_t count, int64_t stride = 1) {
  for (int64_t step = 1; step < count; step *= 2)
    for (int64_t i = 0; i + step < count; i += 2 * step) parts[i * stride] += parts[(i + step) * stride];
  return parts[0];
}

// value·2^n for integer n in [-252, 254] without a library call: two exact factors, so that results below 2^-126 round once, as IEEE subnormals.
inline float scale_by_power(float value, int32_t n) {
  const int32_t half = n / 2;
  return value * from_bits(uint32_t(half + 127) << 23) * from_bits(uint32_t(n - half + 127) << 23);
}

// x within [-limit, limit]; NaN becomes -limit, so that it can be converted to an integer (the callers repair it).
inline float clamp_(float x, float limit) { return std::min(std::max(-limit, x), limit); }

// exp2, the only one of the CPU backend. exp2(0) = 1, exp2(-inf) = +0, exp2(+inf) = +inf, NaN in gives NaN.
// Degree-6 minimax polynomial of 2^f on |f| <= 1/2; error below 1 ulp.
inline float exp2_(float x) {
  const float clamped = clamp_(x, 200.0f);
  const float n = std::nearbyint(clamped);
  const float f = clamped - n;  // exact
  float p = 1.535336188319500e-4f;
  p = std::fma(p, f, 1.339887440266574e-3f);
  p = std::fma(p, f, 9.618437357674640e-3f);
  p = std::fma(p, f, 5.550332471162809e-2f);
  p = std::fma(p, f, 2.402264791363012e-1f);
  p = std::fma(p, f, 6.931472028550421e-1f);
  p = std::fma(p, f, 1.0f);
  const float value = scale_by_power(p, int32_t(n));
  return x != x ? x : value;
}

// exp, the only one of the CPU backend: Cephes' polynomial after a two-part ln2 reduction; error below 1.1 ulp. exp(0) = 1, exp(-inf) = +0.
inline float exp_(float x) {
  const float clamped = clamp_(x, 120.0f);
  const float n = std::nearbyint(clamped * 1.44269504088896341f);
  float r = std::fma(n, -0.693359375f, clamped);
  r = std::fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  const float value = scale_by_power(std::fma(p, r * r, r) + 1.0f, int32_t(n));
  return x != x ? x : value;
}

// x = 2^exponent·(1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); ln(1 + f) = f - f²/2 + tail (Cephes' polynomial).
struct LogParts {
  float exponent, f, tail;
};

inline LogParts log_parts(float x) {
  const bool subnormal = x < 1.17549435e-38f;
  const uint32_t bits = to_bits(subnormal ? x * 8388608.0f : x);
  const float half = from_bits((bits & 0x007fffffu) | 0x3f000000u);
  const bool low = half < 0.707106781186547524f;
  const int32_t exponent = int32_t(bits >> 23) - 126 - (subnormal ? 23 : 0) - (low ? 1 : 0);
  const float f = (low ? half + half : half) - 1.0f;
  float p = 7.0376836292e-2f;
  p = std::fma(p, f, -1.1514610310e-1f);
  p = std::fma(p, f, 1.1676998740e-1f);
  p = std::fma(p, f, -1.2420140846e-1f);
  p = std::fma(p, f, 1.4249322787e-1f);
  p = std::fma(p, f, -1.6668057665e-1f);
  p = std::fma(p, f, 2.0000714765e-1f);
  p = std::fma(p, f, -2.4999993993e-1f);
  p = std::fma(p, f, 3.3333331174e-1f);
  return {float(exponent), f, f * (f * f) * p};
}

// `finite` where x is positive and finite, else the logarithm's limit: -inf at ±0, +inf at +inf, NaN below 0 and at NaN.
inline float log_or_limit(float x, float finite) {
  constexpr float infinity = std::numeric_limits<float>::infinity();
  const float positive = x == infinity ? x : finite;
  const float limit = x == 0.0f ? -infinity : std::numeric_limits<float>::quiet_NaN();
  return x > 0.0f ? positive : limit;
}

// Natural logarithm, subnormals included; log(1) = +0; error below 1 ulp.
inline float log_(float x) {
  const LogParts parts = log_parts(x);
  const float y = std::fma(parts.f * parts.f, -0.5f, std::fma(parts.exponent, -2.12194440e-4f, parts.tail));
  return log_or_limit(x, std::fma(parts.exponent, 0.693359375f, parts.f + y));
}

// Logarithm to base 2, exact at powers of two; error below 1 ulp. log2(e) is taken in two parts.
inline float log2_(float x) {
  const LogParts parts = log_parts(x);
  const float y = std::fma(parts.f * parts.f, -0.5f, parts.tail);
  const float fraction = std::fma(parts.f, 1.44269502e+0f, std::fma(y, 1.44269502e+0f, parts.f * 1.92596303e-8f));
  return log_or_limit(x, parts.exponent + fraction);
}

}  // namespace rlk
