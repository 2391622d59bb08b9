// A warp, and the exchange of numbers between its lanes.

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
