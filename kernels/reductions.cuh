// Sums over a warp, in a fixed order: the same inputs give the same bits.

#pragma once

#include "dtypes.cuh"

#define WARP 32
#define ALL_LANES 0xffffffffu

__device__ __forceinline__ double from_lane(double x, int mask) {
    return __shfl_xor_sync(ALL_LANES, x, mask);
}
template <typename F> __device__ __forceinline__ Real<F> from_lane(Real<F> x, int mask) {
    return {__shfl_xor_sync(ALL_LANES, x.value, mask)};
}

// Every lane gets the sum over its aligned group of `width` lanes (a power of two up to 32).
// All lanes of the warp must call it. No memory is touched.
template <typename A>
__device__ __forceinline__ A warp_sum(A value, int width = WARP) {
    for (int offset = width >> 1; offset > 0; offset >>= 1)
        value += from_lane(value, offset);
    return value;
}
