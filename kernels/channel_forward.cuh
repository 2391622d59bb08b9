// The end of batch norm's and group norm's forward passes: packs of y, from exact statistics.

#pragma once

#include "channels.cuh"

// What a thread needs to know of its channels. The mean in two parts: a single one is off by half
// a unit in the last place, which may be large compared with x - mean.
struct Parameters { A high[OWN], low[OWN], inv_std[OWN], scale[OWN], bias[OWN]; };

__device__ __forceinline__ void set_statistics(
    const Real<double> (&mean)[OWN], const Real<double> (&inv_std)[OWN], Parameters& own
) {
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        own.high[k] = narrow<A>(mean[k]);
        own.low[k] = narrow<A>(exactly(mean[k]) - exactly(own.high[k]));
        own.inv_std[k] = narrow<A>(inv_std[k]);
    }
}

__device__ __forceinline__ void normalize_pack(const Raw<DATA_T, VEC>& x, const Parameters& own, DATA_T* y) {
    A values[VEC];
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
        const A xhat = (widen(x.at(k)) - own.high[k % OWN] - own.low[k % OWN]) * own.inv_std[k % OWN];
        values[k] = fused(xhat, own.scale[k % OWN], own.bias[k % OWN]);
    }
    store<VEC>(y, values);
}
