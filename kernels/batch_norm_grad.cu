// The gradient of batch norm from saved statistics, in three kernels.
//
//   xhat = (x - mean) * inv_std, n elements per channel
//   sum_channels:    partials[0] = sums of dy * xhat, partials[1] = sums of dy
//   finish_channels: dscale, dbias = totals; means = totals / n
//   apply_channels:  dx = inv_std * scale * (dy - means[1] - xhat * means[0])
//
// dy, x, dx: (before, channels, after) of DATA_T, C order; dx may be dy. mean, inv_std: channels of
// STAT_T. scale: channels of PARAM_T, or null (1). dscale, dbias: channels of PARAM_T; a null
// output is not computed. partials: (2, shares, channels) of double, shares = gridDim.y of
// sum_channels. means: (2, channels) of the accumulation dtype. All outputs are written with =.
// Deterministic: fixed orders, no atomics.
//
// Launch: sum_channels and apply_channels as in channels.cuh, blockDim.x * blockDim.y at most
// 256, blockDim.y a power of two; any grid. If VEC > 1, arrays are aligned for packs and after
// (channels if LAST) is a multiple of VEC. finish_channels: blockDim = (x, y), y a
// power of two and x * y at most 1024; any gridDim.x.

#include "channel_gradient.cuh"

__device__ __forceinline__ A dx_of(A dy, A rest, A inv_std, A scale, const Shape&) {
    return (dy - rest) * (inv_std * scale);
}

extern "C" __global__ void __launch_bounds__(256, 2) sum_channels(
    const DATA_T* dy, const DATA_T* x, const STAT_T* mean, const STAT_T* inv_std,
    double* partials, i64 before, i64 channels, i64 after
) {
    __shared__ double tile[TILE];
    sum_gradient(dy, x, mean, inv_std, partials, Shape{before, channels, after}, tile);
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_channels(
    const double* partials, PARAM_T* dscale, PARAM_T* dbias, A* means, i64 shares, i64 channels,
    i64 count
) {
    __shared__ double tile[1024];
    each_column(channels, [&](i64 channel) {
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) {
            const double* rows = partials + plane * shares * channels;
            const double total = column_total(rows, shares, channels, channel, tile);
            if (threadIdx.y != 0 || channel >= channels) continue;
            PARAM_T* out = plane ? dbias : dscale;
            if (out) out[channel] = narrow<PARAM_T>(total);
            means[plane * channels + channel] = narrow<A>(total / count);
        }
    });
}

extern "C" __global__ void __launch_bounds__(256, 2) apply_channels(
    const DATA_T* dy, const DATA_T* x, const PARAM_T* scale, const STAT_T* mean,
    const STAT_T* inv_std, const A* means, DATA_T* dx, i64 before, i64 channels, i64 after
) {
    apply_gradient(dy, x, scale, mean, inv_std, means, dx, Shape{before, channels, after});
}
