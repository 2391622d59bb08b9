// Batch norm forward: y = (x - mean) * inv_std * scale + bias, with statistics per channel.
//
//   sum_deviations: partials[0] = sums of x - centre, partials[1] = sums of its square
//   finish_centre:  centre = totals[0] / n
//   finish_moments: mean = centre + totals[0] / n, variance = totals[1] / n - (totals[0] / n)^2
//   normalize:      y
//
// sum_deviations runs twice: with centre null (about 0), then about the centre. The second pass
// corrects the rounding of the first.
//
// x, y: (before, channels, after) of DATA_T, C order; y may be x. scale, bias: channels of
// PARAM_T or null. mean, inv_std: channels of STAT_T. partials: (2, shares, channels) of
// double, shares = gridDim.y of sum_deviations. centre: channels of double. exact: (2, channels)
// of double, mean and inv_std before rounding. All outputs are written with =. Deterministic:
// fixed orders, no atomics. Sums are in double, so no square overflows or underflows.
//
// Launch: sum_deviations and normalize as in channels.cuh, blockDim.x * blockDim.y at most 256,
// blockDim.y a power of two; any grid. If VEC > 1, arrays are 16-byte aligned and after
// (channels if LAST) is a multiple of VEC. finish_centre and finish_moments: blockDim = (32, 32),
// any gridDim.x.

#include "channels.cuh"

__device__ __forceinline__ void sum_share(
    const DATA_T* x, const Shape& shape, i64 channel, const Real<double> (&centre)[OWN],
    double (&sums)[2][OWN]
) {
    for (Walk walk(shape); walk.inside(shape);) {
        const Places places(walk, shape, channel);
        const Packs packs = fetch_packs(x, places);
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) {
            if (b >= places.count) continue;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const double deviation = exactly(widen(packs.at[b].at(k))) - exactly(centre[k % OWN]);
                sums[0][k % OWN] += deviation;
                sums[1][k % OWN] = fused(deviation, deviation, sums[1][k % OWN]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) sum_deviations(
    const DATA_T* x, const double* centre, double* partials, i64 before, i64 channels, i64 after
) {
    __shared__ double tile[BLOCK_THREADS];
    const Shape shape = {before, channels, after};
    // The condition is the same for the whole block, so all its threads reach the barriers.
    const i64 ahead = threadIdx.x * OWN;
    for (i64 channel = first_channel(); channel - ahead < channels; channel += channel_step()) {
        double sums[2][OWN];
        Real<double> about[OWN];
        fill<OWN>(sums[0], 0.0);
        fill<OWN>(sums[1], 0.0);
        load_own(centre, channel, shape, Real<double>{0}, about);
        if (channel < channels) sum_share(x, shape, channel, about, sums);
        write_sums(sums, channel, shape, partials, tile);
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_centre(
    const double* partials, double* centre, i64 shares, i64 channels, i64 count
) {
    __shared__ double tile[WARP * WARP];
    const i64 step = static_cast<i64>(gridDim.x) * WARP;
    for (i64 start = static_cast<i64>(blockIdx.x) * WARP; start < channels; start += step) {
        const i64 channel = start + threadIdx.x;
        const double total = column_total(partials, shares, channels, channel, tile);
        if (threadIdx.y == 0 && channel < channels) centre[channel] = total / count;
        __syncthreads();  // before the tile is filled again
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_moments(
    const double* partials, const double* centre, double* exact, STAT_T* mean, STAT_T* inv_std,
    i64 shares, i64 channels, i64 count, double eps
) {
    // Two tiles in turn: one's barrier separates the other's readers from its next writers.
    __shared__ double tile[2][WARP * WARP];
    const double* squares = partials + shares * channels;
    const i64 step = static_cast<i64>(gridDim.x) * WARP;
    for (i64 start = static_cast<i64>(blockIdx.x) * WARP; start < channels; start += step) {
        const i64 channel = start + threadIdx.x;
        const double first = column_total(partials, shares, channels, channel, tile[0]) / count;
        const double second = column_total(squares, shares, channels, channel, tile[1]) / count;
        if (threadIdx.y == 0 && channel < channels) {
            const double variance = fused(-first, first, second);
            const double middle = centre[channel] + first;
            const double factor = 1 / sqrt((variance < 0 ? 0 : variance) + eps);
            exact[channel] = middle;
            exact[channels + channel] = factor;
            mean[channel] = narrow<STAT_T>(middle);
            inv_std[channel] = narrow<STAT_T>(factor);
        }
    }
}

// What a thread needs to know of its channels. The mean in two parts: a single one is off by half
// a unit in the last place, which may be large compared with x - mean.
struct Parameters { A high[OWN], low[OWN], inv_std[OWN], scale[OWN], bias[OWN]; };

__device__ __forceinline__ void load_parameters(
    const PARAM_T* scale, const PARAM_T* bias, const double* exact, i64 channel, const Shape& shape,
    Parameters& own
) {
    Real<double> mean[OWN], inv_std[OWN];
    load_own(exact, channel, shape, Real<double>{0}, mean);
    load_own(exact + shape.channels, channel, shape, Real<double>{0}, inv_std);
    load_own(scale, channel, shape, A{1}, own.scale);
    load_own(bias, channel, shape, A{0}, own.bias);
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

extern "C" __global__ void __launch_bounds__(256, 2) normalize(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, const double* exact, DATA_T* y,
    i64 before, i64 channels, i64 after
) {
    const Shape shape = {before, channels, after};
    for (i64 channel = first_channel(); channel < channels; channel += channel_step()) {
        Parameters own;
        load_parameters(scale, bias, exact, channel, shape, own);
        for (Walk walk(shape); walk.inside(shape);) {
            const Places places(walk, shape, channel);
            const Packs packs = fetch_packs(x, places);
#pragma unroll
            for (int b = 0; b < AT_ONCE; ++b)
                if (b < places.count) normalize_pack(packs.at[b], own, y + places.at[b]);
        }
    }
}
