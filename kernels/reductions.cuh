// Sums over a warp and over a block, in a fixed order: the same inputs give the same bits.

#pragma once

#include "dtypes.cuh"

#define WARP 32
#define ALL_LANES 0xffffffffu

// Every lane gets the sum over its aligned group of `width` lanes (a power of two up to 32).
// All lanes of the warp must call it. No memory is touched.
template <typename A>
__device__ __forceinline__ A warp_sum(A value, int width = WARP) {
    for (int offset = width >> 1; offset > 0; offset >>= 1)
        value += __shfl_xor_sync(ALL_LANES, value, offset);
    return value;
}

// Every thread gets the sum over the block. All threads of the block must call it, blockDim.x
// a multiple of 32. `shared` holds one A for each warp and is free again after the next
// __syncthreads() of the caller; the first thing this does is NOT a barrier, so the caller
// must not have other warps still reading `shared`.
template <typename A>
__device__ __forceinline__ A block_sum(A value, A* shared) {
    value = warp_sum(value);
    const int warps = blockDim.x / WARP;
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = value;
    __syncthreads();
    A total = shared[0];
    for (int w = 1; w < warps; ++w) total += shared[w];
    return total;
}
