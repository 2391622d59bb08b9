// The gradient of batch norm with running statistics, which are constants: one pass, then the sums.
//
//   xhat = (x - mean) * inv_std, inv_std = 1 / sqrt(var + eps)
//   infer_gradient:    dx = dy * inv_std * scale; partials[0] = sums of dy * xhat, partials[1] = sums of dy
//   finish_parameters: dscale, dbias = totals
//
// dy, x, dx: (before, channels, after) of DATA_T, C order; dx may be dy, or is not wanted, and null,
// if LACKING. mean, var: channels of STAT_T. scale: channels of PARAM_T, or null (1). partials:
// (2, shares, channels) of double, shares = gridDim.y of infer_gradient; or null if dscale and dbias
// are not computed; x is then not read. dscale, dbias: channels of PARAM_T. All outputs are written
// with =. Deterministic: fixed orders, no atomics.
//
// Launch: infer_gradient as in channels.cuh, blockDim.x * blockDim.y at most 256, blockDim.y a power
// of two; any grid. If VEC > 1, arrays are aligned for packs and after (channels if LAST) is a multiple
// of VEC. finish_parameters: blockDim = (x, y), y a power of two and x * y at most 1024; any gridDim.x.

#include "known_stats.cuh"

#ifndef LACKING
#define LACKING 0
#endif

// Packs, a multiple of AT_ONCE, that are summed in the accumulation dtype before they go to double.
#define STRETCH 16

// Blocks that a multiprocessor must hold: eight channels a thread do not fit into half its registers.
#define RESIDENT (OWN > 4 ? 1 : 2)

// Writes dx of at most STRETCH packs, and adds them to the sums of dy * xhat and of dy.
__device__ __forceinline__ void apply_stretch(
    const DATA_T* dy, const DATA_T* x, const Shape& shape, i64 channel, const Known& of,
    const A (&factor)[OWN], bool summed, Walk& walk, DATA_T* dx, double (&sums)[2][OWN]
) {
    A part[2][OWN];
    fill<OWN>(part[0], A{0});
    fill<OWN>(part[1], A{0});
    for (int i = 0; i < STRETCH && walk.inside(shape); i += AT_ONCE) {
        const Places places(walk, shape, channel);
        const Packs dys = fetch_packs(dy, places);
        const Packs xs = summed ? fetch_packs(x, places) : dys;
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) {
            if (b >= places.count) continue;
            A out[VEC];
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const A own = widen(dys.at[b].at(k));
                out[k] = own * factor[k % OWN];
                part[0][k % OWN] = fused(own, xhat_of(xs.at[b], k, of), part[0][k % OWN]);
                part[1][k % OWN] += own;
            }
            if (!LACKING) store<VEC>(dx + places.at[b], out);
        }
    }
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        sums[0][k] += exactly(part[0][k]);
        sums[1][k] += exactly(part[1][k]);
    }
}

extern "C" __global__ void __launch_bounds__(256, RESIDENT) infer_gradient(
    const DATA_T* dy, const DATA_T* x, const PARAM_T* scale, const STAT_T* mean, const STAT_T* var,
    DATA_T* dx, double* partials, i64 before, i64 channels, i64 after, double eps
) {
    __shared__ double tile[TILE];
    const Shape shape = {before, channels, after};
    // The condition is the same for the whole block, so all its threads reach the barriers.
    const i64 ahead = channel_in_block(after);
    for (i64 channel = first_channel(after); channel - ahead < channels; channel += channel_step()) {
        double sums[2][OWN];
        fill<OWN>(sums[0], 0.0);
        fill<OWN>(sums[1], 0.0);
        if (channel < channels) {
            Known of;
            A factor[OWN];
            load_known(mean, var, eps, channel, shape, of);
            load_own(scale, channel, shape, A{1}, factor);
#pragma unroll
            for (int k = 0; k < OWN; ++k) factor[k] = of.inv_std[k] * factor[k];
            const Place at = place_of(shape, channel);
            for (Walk walk(shape); walk.inside(shape);)
                apply_stretch(dy + at.start, x + at.start, shape, at.channel, of, factor, partials, walk,
                              dx + at.start, sums);
        }
        if (partials) write_sums(sums, channel, channels, after, partials, tile);
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_parameters(
    const double* partials, PARAM_T* dscale, PARAM_T* dbias, i64 shares, i64 channels
) {
    __shared__ double tile[1024];
    write_totals(partials, dscale, dbias, shares, channels, tile);
}
