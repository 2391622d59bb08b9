// Clusters: blocks that run together and reach each other's shared memory; compute capability 9.0 and
// later. The blocks of a cluster share a row.

#pragma once

#include "rows.cuh"

#define CLUSTER 8            // blocks: the most that every such device takes
#define CLUSTER_THREADS 512  // of a block, at most

// The slots in which blocks exchange one sum: the total of each warp of the cluster. Two calls of
// `cluster_sums` in a row use different ones.
constexpr int CLUSTER_WARPS = CLUSTER * CLUSTER_THREADS / WARP;
template <typename T> struct ClusterSlots { T totals[2][CLUSTER_WARPS]; };

// Grids and clusters extend along x. The special register of a rank would keep compilers from joining
// stores: 16 bytes went out by four instructions.
__device__ __forceinline__ int cluster_rank() { return static_cast<int>(blockIdx.x % CLUSTER); }

// Waits for all threads of the cluster; what any of them has written is seen afterwards.
__device__ __forceinline__ void cluster_barrier() {
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
}

// The sum over the threads of a cluster, in a fixed order; every thread gets it.
//
// blockDim.x is a multiple of 32, at most CLUSTER_THREADS. All threads of the cluster must call it,
// first after a barrier of the cluster: the shared memory of a block exists once it has started. Each
// warp writes its total into all blocks; one barrier later they are read, by each block its own.
// `turn` counts the calls, as for `row_sums`.
template <typename T> __device__ __forceinline__ T cluster_sums(T value, ClusterSlots<T>& slots, int turn) {
    const int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    T* totals = slots.totals[turn & 1];
    value = warp_sums(value, WARP);
    if (lane < CLUSTER) {
        T* there = static_cast<T*>(__cluster_map_shared_rank(totals, lane));
        there[cluster_rank() * warps + threadIdx.x / WARP] = value;
    }
    cluster_barrier();
    T sum = {};
#pragma unroll
    for (int first = 0; first < CLUSTER_WARPS; first += WARP)
        if (first + lane < CLUSTER * warps) sum += totals[first + lane];
    return warp_sums(sum, WARP);
}
