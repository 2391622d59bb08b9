// The gradient of batch norm from saved statistics, in three kernels.
//
//   xhat = (x - mean) * inv_std, n elements per channel
//   sum_channels:    partials[0] = sums of dy * xhat, partials[1] = sums of dy
//   finish_channels: dscale, dbias = totals; means = totals / n
//   apply_channels:  dx = inv_std * scale * (dy - means[1] - xhat * means[0])
//
// dy, x, dx: (before, channels, after) of DATA_T, C order; dx may be dy. mean, inv_std: channels
// of STAT_T. scale: channels of PARAM_T, or null (1). dscale, dbias: channels of PARAM_T, or null
// if not wanted. partials: (2, shares, channels) of double, shares = gridDim.y of sum_channels.
// means: (2, channels) of the accumulation dtype. All outputs are written with =. Deterministic:
// fixed orders, no atomics.
//
// Launch: sum_channels and apply_channels as in channels.cuh, blockDim.x * blockDim.y at most
// 256, blockDim.y a power of two; any grid. If VEC > 1, arrays are 16-byte aligned and after
// (channels if LAST) is a multiple of VEC. finish_channels: blockDim = (x, y), y a
// power of two and x * y at most 1024; any gridDim.x.

#include "channel_gradient.cuh"

__device__ __forceinline__ void load_channel(
    const STAT_T* mean, const STAT_T* inv_std, i64 channel, const Shape& shape, Channel& of
) {
    load_own(mean, channel, shape, A{0}, of.mean);
    load_own(inv_std, channel, shape, A{0}, of.inv_std);
}

extern "C" __global__ void __launch_bounds__(256, 2) sum_channels(
    const DATA_T* dy, const DATA_T* x, const STAT_T* mean, const STAT_T* inv_std,
    double* partials, i64 before, i64 channels, i64 after
) {
    __shared__ double tile[BLOCK_THREADS];
    const Shape shape = {before, channels, after};
    // The condition is the same for the whole block, so all its threads reach the barriers.
    const i64 ahead = threadIdx.x * OWN;
    for (i64 channel = first_channel(); channel - ahead < channels; channel += channel_step()) {
        double sums[2][OWN];
        fill<OWN>(sums[0], 0.0);
        fill<OWN>(sums[1], 0.0);
        if (channel < channels) {
            Channel of;
            load_channel(mean, inv_std, channel, shape, of);
            for (Walk walk(shape); walk.inside(shape);)
                sum_stretch(dy, x, shape, channel, of, walk, sums);
        }
        write_sums(sums, channel, shape, partials, tile);
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_channels(
    const double* partials, PARAM_T* dscale, PARAM_T* dbias, A* means, i64 shares, i64 channels,
    i64 count
) {
    __shared__ double tile[1024];
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 start = static_cast<i64>(blockIdx.x) * blockDim.x; start < channels; start += step) {
        const i64 channel = start + threadIdx.x;
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) {
            const double* rows = partials + plane * shares * channels;
            const double total = column_total(rows, shares, channels, channel, tile);
            if (threadIdx.y != 0 || channel >= channels) continue;
            PARAM_T* out = plane ? dbias : dscale;
            if (out) out[channel] = narrow<PARAM_T>(total);
            means[plane * channels + channel] = narrow<A>(total / count);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) apply_channels(
    const DATA_T* dy, const DATA_T* x, const PARAM_T* scale, const STAT_T* mean,
    const STAT_T* inv_std, const A* means, DATA_T* dx, i64 before, i64 channels, i64 after
) {
    const Shape shape = {before, channels, after};
    for (i64 channel = first_channel(); channel < channels; channel += channel_step()) {
        Channel of;
        A factor[OWN], of_product[OWN], of_dy[OWN];
        load_channel(mean, inv_std, channel, shape, of);
        load_own(scale, channel, shape, A{1}, factor);
        load_own(means, channel, shape, A{0}, of_product);
        load_own(means + channels, channel, shape, A{0}, of_dy);
        for (Walk walk(shape); walk.inside(shape);) {
            const Places places(walk, shape, channel);
            const Packs dys = fetch_packs(dy, places), xs = fetch_packs(x, places);
#pragma unroll
            for (int b = 0; b < AT_ONCE; ++b) {
                if (b >= places.count) continue;
                A out[VEC];
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    const A product = fused(xhat_of(xs.at[b], k, of), of_product[k % OWN], of_dy[k % OWN]);
                    out[k] = (widen(dys.at[b].at(k)) - product) * (of.inv_std[k % OWN] * factor[k % OWN]);
                }
                store<VEC>(dx + places.at[b], out);
            }
        }
    }
}
