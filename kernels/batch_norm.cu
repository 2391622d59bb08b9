// Batch norm forward: y = (x - mean) * inv_std * scale + bias, with statistics per channel.
//
//   sum_deviations: partials[0] = sums of x - centre, partials[1] = sums of its square
//                   (if centre is null of x alone; and, if DATA_T is f64, of (x - x0) * 2^-64,
//                   where x0 is the channel's first element)
//   finish_centre:  centre = totals[0] / n; where f64 overflows, x0 + totals[1] / n * 2^64
//   finish_moments: mean = centre + totals[0] / n, variance = totals[1] / n - (totals[0] / n)^2
//   normalize:      y
//
// sum_deviations runs twice: first with centre null, when each thread sums the distances from its
// own first element, then about the centre, rounded to the accumulation type. The second pass
// corrects the first.
//
// x, y: (before, channels, after) of DATA_T, C order; y may be x. scale, bias: channels of
// PARAM_T or null. mean, inv_std: channels of STAT_T. partials: (2, shares, channels) of
// double, shares = gridDim.y of sum_deviations. centre: channels of double. exact: (2, channels)
// of double, mean and inv_std before rounding. All outputs are written with =. Deterministic:
// fixed orders, no atomics. f32 and narrower are summed in floats over a few packs, then in double,
// of which many GPUs have little. If a square overflows or loses digits, the thread sums again in
// double. The mean of finite f64 elements is finite.
//
// Launch: sum_deviations and normalize as in channels.cuh, blockDim.x * blockDim.y at most 256,
// blockDim.y a power of two; any grid. If VEC > 1, arrays are aligned for packs and after
// (channels if LAST) is a multiple of VEC. finish_centre and finish_moments: blockDim = (x, y), y
// a power of two and x * y at most 1024; any gridDim.x.

#include "channel_forward.cuh"
#include "deviations.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) sum_deviations(
    const DATA_T* x, const double* centre, double* partials, i64 before, i64 channels, i64 after
) {
    __shared__ double tile[TILE];
    sum_columns(x, centre, partials, Shape{before, channels, after}, tile);
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_centre(
    const DATA_T* x, const double* partials, double* centre, i64 shares, i64 channels, i64 count,
    i64 after
) {
    __shared__ double tile[1024];
    each_column(channels, [&](i64 channel) {
        const double total = column_total(partials, shares, channels, channel, tile);
        if (threadIdx.y != 0 || channel >= channels) return;
        const bool held = sizeof(DATA_T) < 8 || fabs(total) <= LARGEST;
        if (held) {
            centre[channel] = exactly(narrow<A>(total / count));
        } else {
            const double* const sums = partials + shares * channels;
            double apart = 0;
#pragma unroll 1
            for (i64 row = 0; row < shares; ++row) apart += sums[row * channels + channel];  // rare
            centre[channel] = mean_about(to_double(x[channel * after]), apart, count);
        }
    });
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_moments(
    const double* partials, const double* centre, double* exact, STAT_T* mean, STAT_T* inv_std,
    i64 shares, i64 channels, i64 count, double eps
) {
    each_moments<A>(partials, centre, shares, channels, count, [&](i64 channel, double first, double second) {
        write_moments(first, second, centre, channel, channels, eps, exact, mean, inv_std);
    });
}

extern "C" __global__ void __launch_bounds__(256, 2) normalize(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, const double* exact, DATA_T* y,
    i64 before, i64 channels, i64 after
) {
    normalize_columns(x, scale, bias, exact, y, Shape{before, channels, after});
}
