// Pairs of bf16 values on a processor, beside emulated threads.

#include "emulated_cuda.h"

struct float2 {
    float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline unsigned bf16(float x) {
    unsigned bits = __builtin_bit_cast(unsigned, x);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
}
inline unsigned rounded(float first, float second) { return bf16(first) | bf16(second) << 16; }
