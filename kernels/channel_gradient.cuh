// The gradients of batch norm and group norm: the sums of dy * xhat and of dy, and dx.

#pragma once

#include "channels.cuh"

// Packs, a multiple of AT_ONCE, that are summed in the accumulation dtype before they go to double.
#define STRETCH 16

// Statistics of a thread's channels.
struct Channel { A mean[OWN], inv_std[OWN]; };

__device__ __forceinline__ A xhat_of(const Raw<DATA_T, VEC>& x, int k, const Channel& of) {
    return (widen(x.at(k)) - of.mean[k % OWN]) * of.inv_std[k % OWN];
}

// Adds at most STRETCH packs to the sums of dy * xhat and of dy.
__device__ __forceinline__ void sum_stretch(
    const DATA_T* dy, const DATA_T* x, const Shape& shape, i64 channel, const Channel& of,
    Walk& walk, double (&sums)[2][OWN]
) {
    A part[2][OWN];
    fill<OWN>(part[0], A{0});
    fill<OWN>(part[1], A{0});
    for (int i = 0; i < STRETCH && walk.inside(shape); i += AT_ONCE) {
        const Places places(walk, shape, channel);
        const Packs dys = fetch_packs(dy, places), xs = fetch_packs(x, places);
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) {
            if (b >= places.count) continue;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const A own = widen(dys.at[b].at(k));
                part[0][k % OWN] = fused(own, xhat_of(xs.at[b], k, of), part[0][k % OWN]);
                part[1][k % OWN] += own;
            }
        }
    }
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        sums[0][k] += exactly(part[0][k]);
        sums[1][k] += exactly(part[1][k]);
    }
}

template <typename Columns>
__device__ __forceinline__ void load_statistics(
    const STAT_T* mean, const STAT_T* inv_std, i64 column, const Columns& of, Channel& own
) {
    load_statistic(mean, column, of, A{0}, own.mean);
    load_statistic(inv_std, column, of, A{0}, own.inv_std);
}

// Writes the partial sums of every column.
template <typename Columns>
__device__ __forceinline__ void sum_gradient(
    const DATA_T* dy, const DATA_T* x, const STAT_T* mean, const STAT_T* inv_std, double* partials,
    const Columns& of, double* tile
) {
    // The condition is the same for the whole block, so all its threads reach the barriers.
    const i64 ahead = channel_in_block(of.run());
    for (i64 column = first_channel(of.run()); column - ahead < of.columns(); column += channel_step()) {
        double sums[2][OWN];
        fill<OWN>(sums[0], 0.0);
        fill<OWN>(sums[1], 0.0);
        if (column < of.columns()) {
            Channel own;
            load_statistics(mean, inv_std, column, of, own);
            const Place at = place_of(of, column);
            for (Walk walk(at.shape); walk.inside(at.shape);)
                sum_stretch(dy + at.start, x + at.start, at.shape, at.channel, own, walk, sums);
        }
        write_sums(sums, column, of.columns(), of.run(), partials, tile);
    }
}

// Writes dx = dx_of(dy, xhat * means[0] + means[1], inv_std, scale, of), which each norm defines.
template <typename Columns>
__device__ __forceinline__ void apply_gradient(
    const DATA_T* dy, const DATA_T* x, const PARAM_T* scale, const STAT_T* mean,
    const STAT_T* inv_std, const A* means, DATA_T* dx, const Columns& of
) {
    for (i64 column = first_channel(of.run()); column < of.columns(); column += channel_step()) {
        Channel own;
        A factor[OWN], of_product[OWN], of_rest[OWN];
        load_statistics(mean, inv_std, column, of, own);
        load_parameter(scale, column, of, A{1}, factor);
        load_statistic(means, column, of, A{0}, of_product);
        load_statistic(means + of.statistics(), column, of, A{0}, of_rest);
        const Place at = place_of(of, column);
        for (Walk walk(at.shape); walk.inside(at.shape);) {
            const Places places(walk, at.shape, at.channel);
            const Packs dys = fetch_packs(dy + at.start, places), xs = fetch_packs(x + at.start, places);
#pragma unroll
            for (int b = 0; b < AT_ONCE; ++b) {
                if (b >= places.count) continue;
                A out[VEC];
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    const A rest = fused(xhat_of(xs.at[b], k, own), of_product[k % OWN], of_rest[k % OWN]);
                    out[k] = dx_of(widen(dys.at[b].at(k)), rest, own.inv_std[k % OWN], factor[k % OWN], of);
                }
                store<VEC>(dx + at.start + places.at[b], out);
            }
        }
    }
}
