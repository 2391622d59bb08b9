// Sums of dy * xhat and of dy over a thread's share of its channels.

#pragma once

#include "channels.cuh"

// Packs, a multiple of AT_ONCE, that are summed in the accumulation dtype before they go to double.
#define STRETCH 16

// What a thread needs to know of its channels.
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
