// Batch norm forward: y = (x - mean) * inv_std * scale + bias, with statistics per channel.
//
//   sum_deviations: partials[0] = sums of x - centre, partials[1] = sums of its square
//                   (if centre is null of x alone; and, if DATA_T is f64, of (x - x0) * 2^-64,
//                   where x0 is the channel's first element)
//   finish_centre:  centre = totals[0] / n; where f64 overflows, x0 + totals[1] / n * 2^64
//   finish_moments: mean = centre + totals[0] / n, variance = totals[1] / n - (totals[0] / n)^2
//   normalize:      y
//
// sum_deviations runs twice: with centre null, where each thread adds up distances from its own
// first element, then about the centre, rounded to the accumulation type. The second pass corrects
// the first.
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
// blockDim.y a power of two; any grid. If VEC > 1, arrays are 16-byte aligned and after
// (channels if LAST) is a multiple of VEC. finish_centre and finish_moments: blockDim = (x, y), y
// a power of two and x * y at most 1024; any gridDim.x.

#include "channel_forward.cuh"
#include "deviations.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) sum_deviations(
    const DATA_T* x, const double* centre, double* partials, i64 before, i64 channels, i64 after
) {
    __shared__ double tile[BLOCK_THREADS];
    const Shape shape = {before, channels, after};
    // The condition is the same for the whole block, so all its threads reach the barriers.
    const i64 ahead = threadIdx.x * OWN;
    for (i64 channel = first_channel(); channel - ahead < channels; channel += channel_step()) {
        Sums sums = {};
        Real<double> known[OWN];
        A about[OWN];
        double origin[OWN] = {};
        load_own(centre, channel, shape, Real<double>{0}, known);
#pragma unroll
        for (int k = 0; k < OWN; ++k) about[k] = narrow<A>(known[k]);
        if (channel < channels) {
            const i64 packs = sum_share(x, shape, channel, !centre, about, sums);
#pragma unroll
            for (int k = 0; k < OWN; ++k)
                if (sizeof(DATA_T) == 8 && !centre) origin[k] = to_double(x[(channel + k) * after]);
            const bool held = exact_enough(sums);
            if (!held) sum_share_in_double(x, shape, channel, !centre, origin, about, sums);
            const double count = centre ? 0 : static_cast<double>(packs * (VEC / OWN));
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                const double first = exactly(about[k]), distances = sums.of[0][k];
                sums.of[0][k] = fused(count, first, distances);
                if (sizeof(DATA_T) < 8 || centre || !held) continue;
                const double apart = SHRUNK * first - SHRUNK * origin[k];
                sums.of[1][k] = fused(count, apart, SHRUNK * distances);
            }
        }
        write_sums(sums.of, channel, shape, partials, tile);
    }
}

// A channel's mean from its sums of (x - origin) * SHRUNK. Rare, so by one thread.
__device__ __forceinline__ double mean_about(
    double origin, const double* sums, i64 shares, i64 channels, i64 channel, i64 count
) {
    double total = 0;
#pragma unroll 1
    for (i64 row = 0; row < shares; ++row) total += sums[row * channels + channel];
    const double mean = (SHRUNK * origin + total / count) / SHRUNK;
    return fabs(total) <= LARGEST ? fmin(fmax(mean, -LARGEST), LARGEST) : mean;
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_centre(
    const DATA_T* x, const double* partials, double* centre, i64 shares, i64 channels, i64 count,
    i64 after
) {
    __shared__ double tile[1024];
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 start = static_cast<i64>(blockIdx.x) * blockDim.x; start < channels; start += step) {
        const i64 channel = start + threadIdx.x;
        const double total = column_total(partials, shares, channels, channel, tile);
        if (threadIdx.y != 0 || channel >= channels) continue;
        const bool held = sizeof(DATA_T) < 8 || fabs(total) <= LARGEST;
        if (held) {
            centre[channel] = exactly(narrow<A>(total / count));
        } else {
            const double origin = to_double(x[channel * after]), *sums = partials + shares * channels;
            centre[channel] = mean_about(origin, sums, shares, channels, channel, count);
        }
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_moments(
    const double* partials, const double* centre, double* exact, STAT_T* mean, STAT_T* inv_std,
    i64 shares, i64 channels, i64 count, double eps
) {
    __shared__ double tile[1024];
    const double* squares = partials + shares * channels;
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 start = static_cast<i64>(blockIdx.x) * blockDim.x; start < channels; start += step) {
        const i64 channel = start + threadIdx.x;
        const double distance = column_total(partials, shares, channels, channel, tile) / count;
        const double second = column_total(squares, shares, channels, channel, tile) / count;
        if (threadIdx.y == 0 && channel < channels) {
            const double first = correction_of<A>(distance, centre + channel);
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

__device__ __forceinline__ void load_parameters(
    const PARAM_T* scale, const PARAM_T* bias, const double* exact, i64 channel, const Shape& shape,
    Parameters& own
) {
    Real<double> mean[OWN], inv_std[OWN];
    load_own(exact, channel, shape, Real<double>{0}, mean);
    load_own(exact + shape.channels, channel, shape, Real<double>{0}, inv_std);
    load_own(scale, channel, shape, A{1}, own.scale);
    load_own(bias, channel, shape, A{0}, own.bias);
    set_statistics(mean, inv_std, own);
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
