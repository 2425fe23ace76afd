// What the Hopper products share beside sm90.h: blocks of a cluster, copies for both of two, the ring of stages, the order of tiles.

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 at_rank(u32 shared, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared), "r"(rank));
    return there;
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Arrive at the barrier at this place in block `rank` of the cluster. Only matrix instructions read what it guards, and they are done: the
// default scope is enough, and a cluster's would flush every write of the block.
__device__ __forceinline__ void barrier_arrive_at(u32 barrier, u32 rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(at_rank(barrier, rank)) : "memory");
}

// BOTH: into the same place of both blocks of the cluster.
template <bool BOTH> __device__ __forceinline__ void copy_to(const TensorMap& map, u32 to, u32 barrier, int inner, int outer) {
    if (BOTH)
        asm volatile(
            "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4}], [%2], %5;" ::"r"(
                to),
            "l"(&map), "r"(barrier), "r"(inner), "r"(outer), "h"((unsigned short)3) : "memory");
    else copy(map, to, barrier, inner, outer);
}

template <bool BOTH> __device__ __forceinline__ void copy_to(const TensorMap& map, u32 to, u32 barrier, int inner, int middle, int outer) {
    if (BOTH)
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], "
            "%6;" ::"r"(to),
            "l"(&map), "r"(barrier), "r"(inner), "r"(middle), "r"(outer), "h"((unsigned short)3) : "memory");
    else copy(map, to, barrier, inner, middle, outer);
}

template <int SLOTS> struct Ring {  // position in a ring of stages
    int stage;
    u32 phase = 0;
    __device__ __forceinline__ explicit Ring(int first) : stage(first) { next(0); }
    __device__ __forceinline__ void next(int steps) {
        stage += steps;
        if (stage >= SLOTS) stage -= SLOTS, phase ^= 1;
    }
};

// Output in tiles of a cluster, in bands of tiles, so that operands stay in the cache.
template <int TILE_ROWS, int TILE_COLUMNS> struct Grid {
    static constexpr int BAND = TILE_ROWS >= 256 ? 8 : 16;
    static __device__ __forceinline__ int down(int rows) { return (rows + TILE_ROWS - 1) / TILE_ROWS; }
    static __device__ __forceinline__ int across(int columns) { return (columns + TILE_COLUMNS - 1) / TILE_COLUMNS; }
    static __device__ __forceinline__ int count(int rows, int columns) { return down(rows) * across(columns); }
    static __device__ __forceinline__ void place(int tile, int rows, int columns, int& row, int& column) {
        const int wide = BAND * across(columns), top = tile / wide * BAND, height = min(down(rows) - top, BAND), inside = tile % wide;
        row = (top + inside % height) * TILE_ROWS;
        column = inside / height * TILE_COLUMNS;
    }
};
