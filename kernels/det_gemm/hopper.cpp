// What a Hopper tensor core computes for bf16 inputs and an fp32 accumulator, in integers: the oracle of det_gemm's bytes on that card.
//
// One instruction adds 16 exact products to C at once (MMA-Sim, arXiv 2511.10909; confirmed on a card by tests/gpu/check_hopper.py):
//   1. A value is significand·2^exponent with the significand in [1, 2); a subnormal keeps exponent -126 and a significand below 1.
//   2. A product has the sum of its operands' exponents and a significand below 4: it is not normalised. A zero, C too, has no exponent.
//   3. All 17 terms are aligned to the largest exponent among them, at least -133, and cut towards zero to 25 fraction bits.
//   4. Their sum is exact. It is normalised to fp32 and cut towards zero, subnormals included; from 2^128 on it is infinite; no sum is -0.
//   5. NaN and infinities follow IEEE: infinity minus infinity and 0·infinity are NaN.
// The order of the products, M, N and the tile play no part.
#include <omp.h>

#include <vector>

#include "numerics.h"

using namespace rlk;

namespace {

constexpr int64_t kLanes = 16;  // columns computed side by side
constexpr int64_t kRows = 64;   // rows of one task
constexpr int32_t kFraction = 25;
constexpr int32_t kLeast = -126, kFloor = -133;
constexpr int32_t kNone = -4096;  // exponent of a zero: never the largest
constexpr int32_t kProductShift = kFraction - 14, kSumShift = kFraction - 23;

struct Operand {
  int32_t significand, exponent;  // significand·2^(exponent - 7) for bf16, signed
};

inline bool is_special(uint16_t bits) { return (bits & 0x7f80u) == 0x7f80u; }

inline Operand decode(uint16_t bits) {
  const int32_t field = (bits >> 7) & 0xff, fraction = bits & 0x7f;
  const int32_t magnitude = field ? fraction | 0x80 : fraction;
  return {bits & 0x8000u ? -magnitude : magnitude, magnitude ? std::max(field, 1) - 127 : kNone};
}

// The same for an fp32 value; significand·2^(exponent - 23).
inline Operand decode(float value) {
  const uint32_t bits = to_bits(value);
  const int32_t field = bits >> 23 & 0xff, fraction = bits & 0x007fffff;
  const int32_t magnitude = field ? fraction | 0x00800000 : fraction;
  return {bits >> 31 ? -magnitude : magnitude, magnitude ? std::max(field, 1) - 127 : kNone};
}

// 16 consecutive k of one row, or of kLanes columns; positions past the end are +0.
struct RowGroup {
  uint16_t bits[kGroup];
  int32_t significand[kGroup], exponent[kGroup];
  bool special;
};

struct ColumnGroup {
  uint16_t bits[kGroup][kLanes];
  int32_t significand[kGroup][kLanes], exponent[kGroup][kLanes];
  bool special;
};

void read_row(const uint16_t* from, int64_t count, RowGroup& to) {
  to.special = false;
  for (int64_t k = 0; k < kGroup; ++k) {
    const uint16_t bits = k < count ? from[k] : 0;
    const Operand value = decode(bits);
    to.bits[k] = bits, to.significand[k] = value.significand, to.exponent[k] = value.exponent;
    to.special |= is_special(bits);
  }
}

void read_columns(const uint16_t* from, int64_t stride, int64_t columns, int64_t count, ColumnGroup& to) {
  to.special = false;
  for (int64_t lane = 0; lane < kLanes; ++lane)
    for (int64_t k = 0; k < kGroup; ++k) {
      const uint16_t bits = lane < columns && k < count ? from[lane * stride + k] : 0;
      const Operand value = decode(bits);
      to.bits[k][lane] = bits, to.significand[k][lane] = value.significand, to.exponent[k][lane] = value.exponent;
      to.special |= is_special(bits);
    }
}

// significand·2^shift (shift > 0), aligned `distance` binary places further down and cut towards zero.
inline int32_t aligned(int32_t significand, int32_t shift, int32_t distance) {
  const int32_t sign = significand >> 31;
  const int32_t magnitude = (significand ^ sign) - sign;
  const int32_t cut = (magnitude << shift) >> std::min(distance, 31);
  return (cut ^ sign) - sign;
}

// sum·2^(exponent - kFraction) as fp32, cut towards zero. exponent >= kFloor.
inline float normalised(int64_t sum, int32_t exponent) {
  if (sum == 0) return 0.0f;
  const uint32_t sign = sum < 0 ? 0x80000000u : 0u;
  const uint64_t magnitude = uint64_t(sum < 0 ? -sum : sum);
  const int32_t top = 63 - __builtin_clzll(magnitude);
  const int32_t found = top + exponent - kFraction;
  if (found > 127) return from_bits(sign | 0x7f800000u);
  const int32_t drop = found < kLeast ? kLeast - 23 - (exponent - kFraction) : top - 23;  // binary places below fp32's last one
  const uint32_t kept = uint32_t(drop > 0 ? magnitude >> drop : magnitude << -drop);
  if (kept == 0) return 0.0f;
  return from_bits(sign | (found < kLeast ? kept : (uint32_t(found + 127) << 23) | (kept & 0x007fffffu)));
}

// The sum of the terms where one of them may be NaN or infinite: no finite sum of 17 terms leaves the range of double.
double ieee_sum(const RowGroup& a, const ColumnGroup& b, int64_t lane, float c) {
  double sum = c;
  for (int64_t k = 0; k < kGroup; ++k) sum += double(from_bf16(a.bits[k])) * double(from_bf16(b.bits[k][lane]));
  return sum;
}

// c[lane] += the 16 products of row a with column `lane` of b: one instruction.
void add_group(const RowGroup& a, const ColumnGroup& b, float* c) {
  int32_t largest[kLanes], products[kLanes] = {};
  for (int64_t lane = 0; lane < kLanes; ++lane) largest[lane] = std::max(decode(c[lane]).exponent, kFloor);
  for (int64_t k = 0; k < kGroup; ++k)
    for (int64_t lane = 0; lane < kLanes; ++lane) largest[lane] = std::max(largest[lane], a.exponent[k] + b.exponent[k][lane]);
  for (int64_t k = 0; k < kGroup; ++k)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int32_t distance = largest[lane] - (a.exponent[k] + b.exponent[k][lane]);
      products[lane] += aligned(a.significand[k] * b.significand[k][lane], kProductShift, distance);  // 16 terms fit: below 2^31
    }
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    if (a.special || b.special || !std::isfinite(c[lane])) {
      const double sum = ieee_sum(a, b, lane, c[lane]);
      if (!std::isfinite(sum)) {
        c[lane] = float(sum);
        continue;
      }
    }
    const Operand own = decode(c[lane]);
    const int32_t term = aligned(own.significand, kSumShift, largest[lane] - own.exponent);
    c[lane] = normalised(int64_t(products[lane]) + term, largest[lane]);
  }
}

inline float quiet(float value) { return value != value ? from_bits(0x7fc00000u) : value; }

}  // namespace

extern "C" {

// out[m, n] = Σ_k a[m, k]·b[n, k] over the leaves edges[0] … edges[leaves] of k: groups of 16 from each leaf's first k, leaves joined in fp32
// by the tree of adjacent pairs, one rounding to bf16 at the end (bf16 != 0) or none.
void hopper_product(const uint16_t* a, const uint16_t* b, const int64_t* edges, int64_t leaves, void* out, int64_t bf16, int64_t rows,
                    int64_t columns, int64_t k) {
#pragma omp parallel for collapse(2) schedule(dynamic)
  for (int64_t row = 0; row < rows; row += kRows)
    for (int64_t column = 0; column < columns; column += kLanes) {
      const int64_t high = std::min(kRows, rows - row), wide = std::min(kLanes, columns - column);
      std::vector<float> parts(leaves * kRows * kLanes, 0.0f);
      RowGroup line;
      ColumnGroup panel;
      for (int64_t leaf = 0; leaf < leaves; ++leaf)
        for (int64_t first = edges[leaf]; first < edges[leaf + 1]; first += kGroup) {
          const int64_t count = std::min(kGroup, edges[leaf + 1] - first);
          read_columns(b + column * k + first, k, wide, count, panel);
          for (int64_t r = 0; r < high; ++r) {
            read_row(a + (row + r) * k + first, count, line);
            add_group(line, panel, &parts[(leaf * kRows + r) * kLanes]);
          }
        }
      for (int64_t r = 0; r < high; ++r)
        for (int64_t lane = 0; lane < wide; ++lane) {
          const float total = quiet(pair_tree_sum(&parts[r * kLanes + lane], leaves, kRows * kLanes));
          const int64_t at = (row + r) * columns + column + lane;
          if (bf16)
            static_cast<uint16_t*>(out)[at] = to_bf16(total);
          else
            static_cast<float*>(out)[at] = total;
        }
    }
}

// out[i] = c[i] + the 16 products a[i, :]·b[i, :], one instruction each.
void hopper_steps(const uint16_t* a, const uint16_t* b, const float* c, float* out, int64_t count) {
#pragma omp parallel for schedule(static)
  for (int64_t i = 0; i < count; ++i) {
    RowGroup line;
    ColumnGroup panel;
    float sums[kLanes] = {c[i]};
    read_row(a + i * kGroup, kGroup, line);
    read_columns(b + i * kGroup, kGroup, 1, kGroup, panel);
    add_group(line, panel, sums);
    out[i] = quiet(sums[0]);
  }
}

}  // extern "C"
