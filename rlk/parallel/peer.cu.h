// What ranks of one host send each other, and their sums in the order of the pair tree, on memory that their cards write for each other.
//
// Block b of every rank works on the same elements and talks to block b of the others alone. It writes its parts into the others' windows,
// raises a flag there, waits for theirs, and adds in fp32: ((p0+p1)+(p2+p3))+.... Nothing waits for the host, so a graph can hold it.
//
// Sums have two forms and the same bytes. whole: every rank receives all parts and adds all elements. sliced: rank r receives and adds
// slice r, rounds, and writes the sum into the others' windows. move sends bytes and adds nothing.
//
// A step's parts go to room (step mod 2). Once a rank has read another's flag of step k, that rank has consumed step k-1, whose room step
// k+1 takes; results are written only after every rank's flag of the same step, when all have consumed earlier results.

struct Problem {
    const float *part;
    void *out;
    char *windows[RANKS];
    unsigned *steps;          // of every block: how many steps it has taken, ever
    unsigned *failed;         // host memory: number of the rank that did not answer, plus 1
    unsigned long long patience;  // nanoseconds
    int vectors, count, rank, each;  // each: vectors that a block sends to one rank in a step
    int stride;                      // move: vectors from what one rank is sent to what the next one is, 0 for the same
};

constexpr int SLOT = SLOT_VECTORS;
constexpr unsigned long long FLAG_BYTES = 4ull * RANKS * BLOCKS;

struct Window {
    char *base;
    __device__ unsigned *flag(int block, int sender) const { return reinterpret_cast<unsigned *>(base) + block * RANKS + sender; }
    __device__ float4 *parts(int block, unsigned step, int sender) const {
        return reinterpret_cast<float4 *>(base + FLAG_BYTES) + ((size_t)(block * 3 + (step & 1)) * RANKS + sender) * SLOT;
    }
    __device__ float4 *sums(int block, int sender) const {
        return reinterpret_cast<float4 *>(base + FLAG_BYTES) + ((size_t)(block * 3 + 2) * RANKS + sender) * SLOT;
    }
};

__device__ __forceinline__ unsigned long long now() {
    unsigned long long t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

__device__ __forceinline__ float4 fresh(const float4 *at) {
    float4 v;
    asm volatile("ld.relaxed.sys.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(at));
    return v;
}

// All writes of this block so far are seen by who reads the flag.
__device__ void raise_flags(const Problem &p, unsigned value) {
    __syncthreads();
    const int peer = threadIdx.x;
    if (peer < RANKS && peer != p.rank) {
        unsigned *flag = Window{p.windows[peer]}.flag(blockIdx.x, p.rank);
        asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
    }
}

__device__ void wait_for(const Problem &p, unsigned value) {
    const int peer = threadIdx.x;
    if (peer < RANKS && peer != p.rank) {
        const unsigned *flag = Window{p.windows[p.rank]}.flag(blockIdx.x, peer);
        const unsigned long long began = now();
        for (unsigned looks = 1;; looks++) {
            unsigned seen;
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
            if ((int)(seen - value) >= 0) break;
            if (looks % 1024 == 0 && now() - began > p.patience) {
                *reinterpret_cast<volatile unsigned *>(p.failed) = peer + 1;
                __threadfence_system();
                asm volatile("trap;");
            }
        }
    }
    __syncthreads();
}

__device__ __forceinline__ float4 own(const Problem &p, int vector) {
    if (4 * vector + 3 < p.count) return __ldg(reinterpret_cast<const float4 *>(p.part) + vector);
    float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
    const float *at = p.part + 4 * vector;
    const int left = p.count - 4 * vector;
    if (left > 0) v.x = at[0];
    if (left > 1) v.y = at[1];
    if (left > 2) v.z = at[2];
    return v;
}

__device__ __forceinline__ float4 add(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

__device__ __forceinline__ float4 tree(float4 (&v)[RANKS]) {
#pragma unroll
    for (int width = RANKS; width > 1; width /= 2)
#pragma unroll
        for (int i = 0; i < width / 2; i++) v[i] = add(v[2 * i], v[2 * i + 1]);
    return v[0];
}

// The rounded sum as it is sent and stored: 4 floats, or 4 bf16 in the first 8 bytes.
#if BFLOAT16_OUT
typedef uint2 Out;
__device__ __forceinline__ Out rounded(float4 v) {
    Out o;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(o.x) : "f"(v.y), "f"(v.x));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(o.y) : "f"(v.w), "f"(v.z));
    return o;
}
typedef unsigned short Item;
__device__ __forceinline__ Out fresh_out(const Out *at) {
    Out v;
    asm volatile("ld.relaxed.sys.global.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(at));
    return v;
}
#else
typedef float4 Out;
__device__ __forceinline__ Out rounded(float4 v) { return v; }
typedef float Item;
__device__ __forceinline__ Out fresh_out(const Out *at) { return fresh(at); }
#endif

__device__ __forceinline__ void store(const Problem &p, int vector, Out value) {
    if (4 * vector + 3 < p.count) {
        reinterpret_cast<Out *>(p.out)[vector] = value;
        return;
    }
    const Item *items = reinterpret_cast<const Item *>(&value);
    for (int i = 0; 4 * vector + i < p.count; i++) reinterpret_cast<Item *>(p.out)[4 * vector + i] = items[i];
}

extern "C" __global__ void __launch_bounds__(THREADS) whole(const __grid_constant__ Problem p) {
    unsigned step = p.steps[blockIdx.x];
    const Window mine{p.windows[p.rank]};
    for (int first = blockIdx.x * p.each; first < p.vectors; first += gridDim.x * p.each, step++) {
        const int size = min(p.each, p.vectors - first);
#pragma unroll 4
        for (int i = threadIdx.x; i < size; i += THREADS) {
            const float4 v = own(p, first + i);
#pragma unroll
            for (int peer = 0; peer < RANKS; peer++)
                if (peer != p.rank) Window{p.windows[peer]}.parts(blockIdx.x, step, p.rank)[i] = v;
        }
        raise_flags(p, 2 * step + 1);
        wait_for(p, 2 * step + 1);
#pragma unroll 4
        for (int i = threadIdx.x; i < size; i += THREADS) {
            float4 v[RANKS];
#pragma unroll
            for (int sender = 0; sender < RANKS; sender++)
                v[sender] = sender == p.rank ? own(p, first + i) : fresh(mine.parts(blockIdx.x, step, sender) + i);
            store(p, first + i, rounded(tree(v)));
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) p.steps[blockIdx.x] = step;
}

extern "C" __global__ void __launch_bounds__(THREADS) sliced(const __grid_constant__ Problem p) {
    unsigned step = p.steps[blockIdx.x];
    const Window mine{p.windows[p.rank]};
    const int stride = RANKS * p.each;
    for (int first = blockIdx.x * stride; first < p.vectors; first += gridDim.x * stride, step++) {
        const auto size = [&](int slice) { return max(0, min(p.each, p.vectors - first - slice * p.each)); };
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++) {
            if (peer == p.rank) continue;
            float4 *there = Window{p.windows[peer]}.parts(blockIdx.x, step, p.rank);
#pragma unroll 4
            for (int i = threadIdx.x; i < size(peer); i += THREADS) there[i] = own(p, first + peer * p.each + i);
        }
        raise_flags(p, 2 * step + 1);
        wait_for(p, 2 * step + 1);
        const int at = first + p.rank * p.each;
#pragma unroll 4
        for (int i = threadIdx.x; i < size(p.rank); i += THREADS) {
            float4 v[RANKS];
#pragma unroll
            for (int sender = 0; sender < RANKS; sender++)
                v[sender] = sender == p.rank ? own(p, at + i) : fresh(mine.parts(blockIdx.x, step, sender) + i);
            const Out sum = rounded(tree(v));
            store(p, at + i, sum);
#pragma unroll
            for (int peer = 0; peer < RANKS; peer++)
                if (peer != p.rank) reinterpret_cast<Out *>(Window{p.windows[peer]}.sums(blockIdx.x, p.rank))[i] = sum;
        }
        raise_flags(p, 2 * step + 2);
        wait_for(p, 2 * step + 2);
#pragma unroll
        for (int sender = 0; sender < RANKS; sender++) {
            if (sender == p.rank) continue;
            const Out *sums = reinterpret_cast<const Out *>(mine.sums(blockIdx.x, sender));
#pragma unroll 4
            for (int i = threadIdx.x; i < size(sender); i += THREADS) store(p, first + sender * p.each + i, fresh_out(sums + i));
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) p.steps[blockIdx.x] = step;
}

extern "C" __global__ void __launch_bounds__(THREADS) move(const __grid_constant__ Problem p) {
    unsigned step = p.steps[blockIdx.x];
    const Window mine{p.windows[p.rank]};
    const float4 *part = reinterpret_cast<const float4 *>(p.part);
    float4 *out = reinterpret_cast<float4 *>(p.out);
    for (int first = blockIdx.x * p.each; first < p.vectors; first += gridDim.x * p.each, step++) {
        const int size = min(p.each, p.vectors - first);
#pragma unroll
        for (int peer = 0; peer < RANKS; peer++) {
            float4 *there = peer == p.rank ? out + (size_t)peer * p.vectors + first : Window{p.windows[peer]}.parts(blockIdx.x, step, p.rank);
            const float4 *from = part + (size_t)peer * p.stride + first;
#pragma unroll 4
            for (int i = threadIdx.x; i < size; i += THREADS) there[i] = __ldg(from + i);
        }
        raise_flags(p, 2 * step + 1);
        wait_for(p, 2 * step + 1);
#pragma unroll
        for (int sender = 0; sender < RANKS; sender++) {
            if (sender == p.rank) continue;
            const float4 *here = mine.parts(blockIdx.x, step, sender);
#pragma unroll 4
            for (int i = threadIdx.x; i < size; i += THREADS) out[(size_t)sender * p.vectors + first + i] = fresh(here + i);
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) p.steps[blockIdx.x] = step;
}
