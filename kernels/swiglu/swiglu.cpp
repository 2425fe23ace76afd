// swiglu = silu(gate)·up in fp32, one rounding to bf16. Each row of gate_up holds, per shard, [gate of the shard | up of the shard].
#include "silu.h"

using namespace rlk;

extern "C" {

// gate_up: [tokens, shards, 2, width]; y: [tokens, shards, width].
void swiglu_forward(const uint16_t* gate_up, uint16_t* y, int64_t tokens, int64_t shards, int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t piece = 0; piece < tokens * shards; ++piece) {
    const uint16_t *gate = gate_up + piece * 2 * width, *up = gate + width;
    for (int64_t i = 0; i < width; ++i) y[piece * width + i] = to_bf16(silu(from_bf16(gate[i])) * from_bf16(up[i]));
  }
}

// dgate = (dy·up)·slope(gate), dup = dy·silu(gate), in the packed layout of gate_up.
void swiglu_backward(const uint16_t* gate_up, const uint16_t* dy, uint16_t* dgate_up, int64_t tokens, int64_t shards, int64_t width) {
#pragma omp parallel for schedule(static)
  for (int64_t piece = 0; piece < tokens * shards; ++piece) {
    const uint16_t *gate = gate_up + piece * 2 * width, *up = gate + width, *out = dy + piece * width;
    uint16_t *dgate = dgate_up + piece * 2 * width, *dup = dgate + width;
    for (int64_t i = 0; i < width; ++i) {
      const float g = from_bf16(gate[i]), d = from_bf16(out[i]);
      dgate[i] = to_bf16(d * from_bf16(up[i]) * silu_slope(g));
      dup[i] = to_bf16(d * silu(g));
    }
  }
}
}
