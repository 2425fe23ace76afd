// Parts of kernels for Hopper: barriers of shared memory, copies by the tensor copy engine, warpgroup matrix instructions, roundings.

typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(64) TensorMap { u64 opaque[16]; };

constexpr int LINE = 128, CHUNK = 64 * LINE;  // a line: 64 values of bf16, swizzled over 128 bytes; a chunk: 64 of them

__device__ __forceinline__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void barrier_init(u32 barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 phase) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ void copy(const TensorMap& map, u32 to, u32 barrier, int inner, int outer) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(inner), "r"(outer) : "memory");
}

__device__ __forceinline__ void copy(const TensorMap& map, u32 to, u32 barrier, int inner, int middle, int outer) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(inner), "r"(middle), "r"(outer) : "memory");
}

// What this thread wrote to shared memory, for the matrix unit and the copy engine.
__device__ __forceinline__ void shared_written() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The matrix instruction's view of an operand in swizzled lines. across: its columns lie along the lines, in chunks.
__device__ __forceinline__ u64 descriptor(u32 shared, bool across) {
    return (1ull << 62) | (64ull << 32) | ((across ? u64(CHUNK >> 4) : 1ull) << 16) | u64((shared & 0x3FFFF) >> 4);
}

__device__ __forceinline__ void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_end() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void await_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Keeps reads and writes of an accumulator on their side of the products.
template <int COUNT> __device__ __forceinline__ void pin(float (&x)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(x[i])::"memory");
}

// 16 rows of 128 columns in two chunks of lines, as the matrix instruction holds them in the registers of a warp.
__device__ __forceinline__ void hold(u32 (&held)[32], u32 from, int lane) {
    const int row = lane % 16;
#pragma unroll
    for (int g = 0; g < 8; ++g) {
        const u32 at = from + g / 4 * CHUNK + row * LINE + (((g % 4 * 2 + lane / 16) ^ row % 8) << 4);
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(held[4 * g]), "=r"(held[4 * g + 1]), "=r"(held[4 * g + 2]), "=r"(held[4 * g + 3]) : "r"(at) : "memory");
    }
}

#define MINUS_INFINITY __int_as_float(0xFF800000)

__device__ __forceinline__ float exp2_kept(float x) {  // the card's own; a subnormal result is kept
    float y;
    asm volatile("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float exp2_normal(float x) {  // the same for x >= -126, in a quarter of the instructions
    float y;
    asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two values rounded to nearest even, the first in the lower half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// The same; every NaN is the quiet one.
__device__ __forceinline__ u32 rounded(float low, float high) {
    u32 both = pack(low, high);
    if (!(low == low)) both = (both & 0xFFFF0000u) | 0x7FC0u;
    if (!(high == high)) both = (both & 0x0000FFFFu) | 0x7FC00000u;
    return both;
}

// Four lanes hold the pieces 2q, 2q+1 of four groups of 8 columns; afterwards lane q holds group q whole.
__device__ __forceinline__ void transpose(u32 (&v)[4], int lane) {
    const bool upper = lane & 2, odd = lane & 1;
    u32 x = __shfl_xor_sync(~0u, upper ? v[0] : v[2], 2), y = __shfl_xor_sync(~0u, upper ? v[1] : v[3], 2);
    if (upper) v[0] = x, v[1] = y;
    else v[2] = x, v[3] = y;
    x = __shfl_xor_sync(~0u, odd ? v[0] : v[1], 1), y = __shfl_xor_sync(~0u, odd ? v[2] : v[3], 1);
    if (odd) v[0] = x, v[2] = y;
    else v[1] = x, v[3] = y;
}
