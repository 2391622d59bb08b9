// Blocks of several rows: thread (x, y) works on row y of the block; blockDim.x threads per row.

#pragma once

#include "packs.cuh"
#include "reductions.cuh"

template <typename A> struct Pair {
    A first, second;
    __device__ __forceinline__ Pair& operator+=(Pair b) {
        first += b.first;
        second += b.second;
        return *this;
    }
};

// The shuffles of both are in flight together.
template <typename A> __device__ __forceinline__ Pair<A> from_lane(Pair<A> x, int mask) {
    return {from_lane(x.first, mask), from_lane(x.second, mask)};
}

// The sum, of one number or of a pair, over each lane's aligned group of `width` lanes, a power of
// two up to 32. All lanes of the warp must call it.
template <typename T> __device__ __forceinline__ T warp_sums(T value, int width) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        if (offset < width) value += from_lane(value, offset);
    return value;
}

#define ROW_WARPS 16  // that share a row, at most

// The sum over the threads of a row, in a fixed order; every thread of the row gets it.
//
// blockDim.x is a power of two below 32, or a multiple of 32 up to 512; blockDim.x * blockDim.y is a
// multiple of 32, at most 1024. All threads of the block must call it. `slots` holds 2 * 32 values. `turn`
// counts the calls: two calls in a row use different slots, and the barrier of the call between them
// separates a call's writes from the reads of the last call with the same slots. So one barrier per call
// is enough. WHOLE_WARPS: blockDim.x is at least 32.
template <bool WHOLE_WARPS = false, typename T>
__device__ __forceinline__ T row_sums(T value, T* slots, int turn) {
    const int threads = blockDim.x;
    const int width = !WHOLE_WARPS && threads < WARP ? threads : WARP;
    value = warp_sums(value, width);
    if (threads <= WARP) return value;  // the whole block takes the same branch
    const int warps = threads / WARP;
    T* row = slots + (turn & 1) * WARP + threadIdx.y * warps;
    if (threadIdx.x % WARP == 0) row[threadIdx.x / WARP] = value;
    __syncthreads();
    // Always as many lanes, of which those beyond the warps add 0: fewer would take registers.
    const int lane = threadIdx.x % ROW_WARPS;
    return warp_sums(lane < warps ? row[lane] : T{}, ROW_WARPS);
}

#define MERGED_THREADS 256  // of a block of several rows, at most

// Adds one pack of column sums over the rows of the block. All threads of the block must call it;
// those with threadIdx.y == 0 get the result. `tile` holds N values for each thread.
template <int N, typename A> __device__ __forceinline__ void merge_rows(A (&sums)[N], A* tile) {
    __syncthreads();  // `tile` may still be read by the call before
#pragma unroll
    for (int k = 0; k < N; ++k) tile[(threadIdx.y * blockDim.x + threadIdx.x) * N + k] = sums[k];
    __syncthreads();
    if (threadIdx.y != 0) return;
    for (int y = 1; y < blockDim.y; ++y)
#pragma unroll
        for (int k = 0; k < N; ++k) sums[k] += tile[(y * blockDim.x + threadIdx.x) * N + k];
}
