// Runs a CUDA kernel on a processor: every thread of a cluster is a fiber, and one runs until it waits for others. Included before the
// kernel's source, with CLUSTER and THREADS defined.

#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#define EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __cluster_dims__(...)
#define __launch_bounds__(...)
#define SHARED(name) unsigned long long* name = emulated_shared()

namespace emulated {

constexpr int FIBERS = CLUSTER * THREADS, STACK = 1 << 16, MOST_SHARED = 1 << 18;

struct Barrier {
    int waiting = 0, turn = 0;
};

ucontext_t fibers[FIBERS], host;
std::vector<char> stacks(size_t(FIBERS) * STACK), shared(size_t(CLUSTER) * MOST_SHARED);
Barrier warps[FIBERS / 32], blocks[CLUSTER], cluster;
uint64_t given[FIBERS];
bool done[FIBERS];
int now, cluster_number;

inline void next() {
    int from = now;
    do now = (now + 1) % FIBERS;
    while (done[now] && now != from);
    if (now != from) swapcontext(&fibers[from], &fibers[now]);
    else if (done[from]) swapcontext(&fibers[from], &host);
}

inline void wait(Barrier& barrier, int count) {
    int turn = barrier.turn;
    if (++barrier.waiting == count) barrier.waiting = 0, barrier.turn++;
    while (barrier.turn == turn) next();
}

inline void wait_warp() { wait(warps[now / 32], 32); }

struct Index {
    struct {
        operator int() const { return now % THREADS; }
    } x;
};
struct BlockIndex {
    struct {
        operator int() const { return cluster_number * CLUSTER + now / THREADS; }
    } x;
};

template <class T> T of_lane(T value, int lane) {
    std::memcpy(&given[now], &value, sizeof value);
    wait_warp();
    std::memcpy(&value, &given[now / 32 * 32 + lane], sizeof value);
    wait_warp();
    return value;
}

}  // namespace emulated

static emulated::Index threadIdx;
static emulated::BlockIndex blockIdx;

inline void __syncthreads() { emulated::wait(emulated::blocks[emulated::now / THREADS], THREADS); }
inline void cluster_sync() { emulated::wait(emulated::cluster, emulated::FIBERS); }
inline unsigned rank_in_cluster() { return emulated::now / THREADS; }
inline unsigned long long of_block(const unsigned long long* shared, unsigned rank) {
    long at = (const char*)shared - emulated::shared.data();
    return *(const unsigned long long*)(emulated::shared.data() + at % emulated::MOST_SHARED + rank * emulated::MOST_SHARED);
}
inline unsigned long long* emulated_shared() {
    return (unsigned long long*)(emulated::shared.data() + emulated::now / THREADS * emulated::MOST_SHARED);
}

template <class T> T __shfl_sync(unsigned, T value, int lane) { return emulated::of_lane(value, lane); }
template <class T> T __shfl_xor_sync(unsigned, T value, int mask) { return emulated::of_lane(value, emulated::now % 32 ^ mask); }
template <class T> T __shfl_up_sync(unsigned, T value, int step) {
    int lane = emulated::now % 32;
    return emulated::of_lane(value, lane < step ? lane : lane - step);
}
inline unsigned __ballot_sync(unsigned, bool value) {
    emulated::given[emulated::now] = value;
    emulated::wait_warp();
    unsigned bits = 0;
    for (int lane = 0; lane < 32; lane++) bits |= unsigned(emulated::given[emulated::now / 32 * 32 + lane] != 0) << lane;
    emulated::wait_warp();
    return bits;
}

struct int4 {
    int x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};

inline int __reduce_max_sync(unsigned, int value) {
    for (int step = 16; step; step /= 2) {
        int other = emulated::of_lane(value, emulated::now % 32 ^ step);
        value = other > value ? other : value;
    }
    return value;
}
template <class T> T max(T a, T b) { return a > b ? a : b; }
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T __ldg(const T* p) { return *p; }
inline unsigned atomicAdd(unsigned* p, unsigned value) { return *p += value, *p - value; }
inline unsigned long long atomicCAS(unsigned long long* p, unsigned long long old, unsigned long long value) {
    unsigned long long found = *p;
    return found == old ? *p = value, found : found;
}
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) { return (unsigned __int128)a * b >> 64; }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1 / a; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }

namespace emulated {

// All clusters of a launch, one after the other
inline void launch(int clusters, void (*kernel)()) {
    static void (*run)();
    run = kernel;
    auto body = [] { run(), done[now] = true, next(); };
    static void (*entry)();
    entry = +body;
    for (cluster_number = 0; cluster_number < clusters; cluster_number++) {
        for (int i = 0; i < FIBERS; i++) {
            done[i] = false;
            getcontext(&fibers[i]);
            fibers[i].uc_stack.ss_sp = &stacks[size_t(i) * STACK], fibers[i].uc_stack.ss_size = STACK, fibers[i].uc_link = &host;
            makecontext(&fibers[i], entry, 0);
        }
        std::memset(shared.data(), 0x5a, shared.size());
        now = 0;
        swapcontext(&host, &fibers[0]);
    }
}

}  // namespace emulated
