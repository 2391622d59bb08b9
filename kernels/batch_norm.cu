// Batch norm forward: y = (x - mean) * inv_std * scale + bias, with statistics per channel.
//
//   sum_deviations: partials[0] = sums of x - centre, partials[1] = sums of its square
//                   (of x alone if centre is null; partials[1] then means nothing)
//   finish_centre:  centre = totals[0] / n
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
// double.
//
// Launch: sum_deviations and normalize as in channels.cuh, blockDim.x * blockDim.y at most 256,
// blockDim.y a power of two; any grid. If VEC > 1, arrays are 16-byte aligned and after
// (channels if LAST) is a multiple of VEC. finish_centre and finish_moments: blockDim = (x, y), y
// a power of two and x * y at most 1024; any gridDim.x.

#include "channels.cuh"

// Packs, a multiple of AT_ONCE, that are summed in the accumulation dtype before they go to double.
#define STRETCH (LAST ? 16 : AT_ONCE)

// A thread's sums for its channels of x - centre and of its square; `apart` has a bit set if an
// element is not the centre.
struct Sums {
    double of[2][OWN];
    u32 apart[OWN];
};

// Adds the elements of one pack.
__device__ __forceinline__ void add_pack(
    const Raw<DATA_T, VEC>& x, const A (&centre)[OWN], A (&part)[2][OWN], Sums& sums
) {
    A own[2][OWN];
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
        const A deviation = widen(x.at(k)) - centre[k % OWN];
        sums.apart[k % OWN] |= __float_as_uint(narrow<f32>(deviation)) & 0x7fffffffu;
        A (&sum)[OWN] = own[0], (&squares)[OWN] = own[1];
        sum[k % OWN] = k < OWN ? deviation : sum[k % OWN] + deviation;
        squares[k % OWN] = k < OWN ? deviation * deviation : fused(deviation, deviation, squares[k % OWN]);
    }
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        part[0][k] += own[0][k];
        part[1][k] += own[1][k];
    }
}

// The sums about `centre`; with `about_first` about the thread's first element of each channel,
// which then goes to `centre`. Returns the number of packs.
__device__ __forceinline__ i64 sum_share(
    const DATA_T* x, const Shape& shape, i64 channel, bool about_first, A (&centre)[OWN], Sums& sums
) {
    i64 count = 0;
    for (Walk walk(shape); walk.inside(shape);) {
        A part[2][OWN];
        fill<OWN>(part[0], A{0});
        fill<OWN>(part[1], A{0});
        for (int i = 0; i < STRETCH && walk.inside(shape); i += AT_ONCE) {
            const Places places(walk, shape, channel);
            const Packs packs = fetch_packs(x, places);
#pragma unroll
            for (int k = 0; k < OWN; ++k)
                if (about_first && count == 0) centre[k] = widen(packs.at[0].at(k));
#pragma unroll
            for (int b = 0; b < AT_ONCE; ++b)
                if (b < places.count) add_pack(packs.at[b], centre, part, sums);
            count += places.count;
        }
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            sums.of[0][k] += exactly(part[0][k]);
            sums.of[1][k] += exactly(part[1][k]);
        }
    }
    return count;
}

// The same sums in double, with `about_first` about 0. Rare, so in little code.
__device__ __forceinline__ void sum_share_in_double(
    const DATA_T* x, const Shape& shape, i64 channel, bool about_first, A (&centre)[OWN], Sums& sums
) {
    if (about_first) fill<OWN>(centre, A{0});
    fill<OWN>(sums.of[0], 0.0);
    fill<OWN>(sums.of[1], 0.0);
#pragma unroll 1
    for (Walk walk(shape); walk.inside(shape); walk.next()) {
        const Raw<DATA_T, VEC> values = fetch<VEC>(x + walk.index(shape, channel));
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const double deviation = to_double(values.at(k)) - exactly(centre[k % OWN]);
            sums.of[0][k % OWN] += deviation;
            sums.of[1][k % OWN] = fused(deviation, deviation, sums.of[1][k % OWN]);
        }
    }
}

// Whether sums about a centre lost nothing that counts, and no distance overflowed.
__device__ __forceinline__ bool exact_enough(const Sums& sums) {
    bool exact = true;
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        const bool squares = sizeof(DATA_T) == 8 || sums.apart[k] == 0 || squares_held(sums.of[1][k]);
        exact = exact && squares && fabs(sums.of[0][k]) <= LARGEST;
    }
    return exact;
}

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
        load_own(centre, channel, shape, Real<double>{0}, known);
#pragma unroll
        for (int k = 0; k < OWN; ++k) about[k] = narrow<A>(known[k]);
        if (channel < channels) {
            const i64 packs = sum_share(x, shape, channel, !centre, about, sums);
            if (!exact_enough(sums)) sum_share_in_double(x, shape, channel, !centre, about, sums);
            const double count = centre ? 0 : static_cast<double>(packs * (VEC / OWN));
#pragma unroll
            for (int k = 0; k < OWN; ++k) sums.of[0][k] = fused(count, exactly(about[k]), sums.of[0][k]);
        }
        write_sums(sums.of, channel, shape, partials, tile);
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_centre(
    const double* partials, double* centre, i64 shares, i64 channels, i64 count
) {
    __shared__ double tile[1024];
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 start = static_cast<i64>(blockIdx.x) * blockDim.x; start < channels; start += step) {
        const i64 channel = start + threadIdx.x;
        const double total = column_total(partials, shares, channels, channel, tile);
        if (threadIdx.y == 0 && channel < channels) centre[channel] = exactly(narrow<A>(total / count));
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
        const double first = column_total(partials, shares, channels, channel, tile) / count;
        const double second = column_total(squares, shares, channels, channel, tile) / count;
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
