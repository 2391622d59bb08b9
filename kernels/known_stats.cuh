// Reads running statistics: a mean and a variance per channel.

#pragma once

#include "channels.cuh"

struct Known { A mean[OWN], inv_std[OWN]; };

// inv_std = 1 / sqrt(var + eps) in double, once for all elements of a channel that a thread visits.
__device__ __forceinline__ void load_known(
    const STAT_T* mean, const STAT_T* var, double eps, i64 channel, const Shape& shape, Known& of
) {
    A variance[OWN];
    load_own(mean, channel, shape, A{0}, of.mean);
    load_own(var, channel, shape, A{1}, variance);
#pragma unroll
    for (int k = 0; k < OWN; ++k) of.inv_std[k] = narrow<A>(1 / sqrt(exactly(variance[k]) + eps));
}

__device__ __forceinline__ A xhat_of(const Raw<DATA_T, VEC>& x, int k, const Known& of) {
    return (widen(x.at(k)) - of.mean[k % OWN]) * of.inv_std[k % OWN];
}
