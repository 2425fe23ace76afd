// Entry points to the functions of numerics.h, one call each, for tests/test_native_numerics.py.
#include <omp.h>

#include "numerics.h"

using namespace rlk;

extern "C" {

void probe_exp(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = exp_(x[i]);
}

void probe_exp2(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = exp2_(x[i]);
}

void probe_log(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = log_(x[i]);
}

void probe_log2(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = log2_(x[i]);
}

// A planted error: exp through one rounded product, which loses bits as |x| grows.
void probe_careless_exp(const float* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = exp2_(x[i] * 1.44269504f);
}

void probe_to_bf16(const float* x, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = to_bf16(x[i]);
}

void probe_from_bf16(const uint16_t* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = from_bf16(x[i]);
}

void probe_row_tree_sum(float* scratch, float* y, int64_t n) { y[0] = row_tree_sum(scratch, n); }

void probe_pair_tree_sum(float* parts, float* y, int64_t count, int64_t stride) { y[0] = pair_tree_sum(parts, count, stride); }

void probe_group_dot(const float* a, const float* b, float* y) { y[0] = group_dot(a, b); }

// threads[0] = OpenMP threads that ran; flushed[0] = those that flush subnormal results (1 each) or subnormal operands (1 each).
void probe_flush(int64_t* threads, int64_t* flushed) {
  int64_t ran = 0, zeros = 0;
#pragma omp parallel reduction(+ : ran, zeros)
  {
    volatile float small = 1e-38f, tenth = 0.1f, subnormal = 1e-40f, one = 1e30f;
    const volatile float result = small * tenth, operand = subnormal * one;
    ran += 1;
    zeros += (result == 0.0f) + (operand == 0.0f);
  }
  threads[0] = ran;
  flushed[0] = zeros;
}
}
