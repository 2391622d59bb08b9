// The last step of batch norm's and group norm's forward passes: y.

#pragma once

#include "channels.cuh"

// Statistics and parameters of a thread's channels. The mean in two parts: a single one is off by half
// a unit in the last place, which may be large compared with x - mean.
struct Parameters { A high[OWN], low[OWN], inv_std[OWN], scale[OWN], bias[OWN]; };

__device__ __forceinline__ void normalize_pack(const Raw<DATA_T, VEC>& x, const Parameters& own, DATA_T* y) {
    A values[VEC];
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
        const A xhat = (widen(x.at(k)) - own.high[k % OWN] - own.low[k % OWN]) * own.inv_std[k % OWN];
        values[k] = fused(xhat, own.scale[k % OWN], own.bias[k % OWN]);
    }
    store<VEC>(y, values);
}

template <typename Columns>
__device__ __forceinline__ void load_parameters(
    const PARAM_T* scale, const PARAM_T* bias, const double* exact, i64 column, const Columns& of,
    Parameters& own
) {
    Real<double> mean[OWN], low[OWN], inv_std[OWN];
    load_statistic(exact, column, of, Real<double>{0}, mean);
    load_statistic(exact + of.statistics(), column, of, Real<double>{0}, low);
    load_statistic(exact + 2 * of.statistics(), column, of, Real<double>{0}, inv_std);
    load_parameter(scale, column, of, A{1}, own.scale);
    load_parameter(bias, column, of, A{0}, own.bias);
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        own.high[k] = narrow<A>(mean[k]);
        own.low[k] = narrow<A>(exactly(mean[k]) - exactly(own.high[k]) + exactly(low[k]));
        own.inv_std[k] = narrow<A>(inv_std[k]);
    }
}

// Writes y.
template <typename Columns>
__device__ __forceinline__ void normalize_columns(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, const double* exact, DATA_T* y,
    const Columns& of
) {
    for (i64 column = first_channel(of.run()); column < of.columns(); column += channel_step()) {
        Parameters own;
        load_parameters(scale, bias, exact, column, of, own);
        const Place at = place_of(of, column);
        for (Walk walk(at.shape); walk.inside(at.shape);) {
            const Places places(walk, at.shape, at.channel);
            const Packs packs = fetch_packs(x + at.start, places);
#pragma unroll
            for (int b = 0; b < AT_ONCE; ++b)
                if (b < places.count) normalize_pack(packs.at[b], own, y + at.start + places.at[b]);
        }
    }
}
