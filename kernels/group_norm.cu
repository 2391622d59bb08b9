// Group norm forward: y = (x - mean) * inv_std * scale + bias, with statistics of each sample's
// groups of channels.
//
//   sum_group_deviations: partials[0] = sums of x - centre over each column, partials[1] = sums of
//                         its square (of x alone if centre is null; partials[1] then means nothing)
//   finish_group_centre:  centre = totals[0] / n over each group
//   finish_group_moments: mean = centre + totals[0] / n, variance = totals[1] / n - (totals[0] / n)^2
//   normalize_groups:     y
//
// sum_group_deviations runs twice, as sum_deviations of batch_norm.cu does, and sums as it does.
//
// x, y: (samples, channels, space), or (samples, space, channels) if LAST, of DATA_T, C order; y may
// be x. Groups are of `width` adjacent channels, numbered sample by sample. scale, bias: channels of
// PARAM_T or null. mean, inv_std: groups of STAT_T. partials: (2, shares, columns) of double,
// shares = gridDim.y of sum_group_deviations, columns = samples * channels. centre: groups of
// double. exact: (2, groups) of double, mean and inv_std before rounding. All outputs are written
// with =. Deterministic: fixed orders, no atomics. No size is 0.
//
// Launch: sum_group_deviations and normalize_groups as in channels.cuh, with columns in the place of
// channels, blockDim.x * blockDim.y at most 256, blockDim.y a power of two; any grid. If VEC > 1,
// arrays are 16-byte aligned and space (channels if LAST) is a multiple of VEC. finish_group_centre
// and finish_group_moments: blockDim = (threads per group, groups), x a power of two, x * y a
// multiple of 32 and at most 1024; any gridDim.x.

#include "channel_forward.cuh"
#include "deviations.cuh"
#include "groups.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) sum_group_deviations(
    const DATA_T* x, const double* centre, double* partials, i64 samples, i64 channels, i64 space,
    i64 width
) {
    __shared__ double tile[BLOCK_THREADS];
    const Extent of = {samples, channels, space, width};
    // The condition is the same for the whole block, so all its threads reach the barriers.
    const i64 ahead = threadIdx.x * OWN;
    for (i64 column = first_channel(); column - ahead < of.columns(); column += channel_step()) {
        Sums sums = {};
        Real<double> known[OWN];
        A about[OWN];
        load_groups(centre, column, of, Real<double>{0}, known);
#pragma unroll
        for (int k = 0; k < OWN; ++k) about[k] = narrow<A>(known[k]);
        if (column < of.columns()) {
            const Place at(of, column);
            const DATA_T* from = x + at.start;
            const i64 packs = sum_share(from, at.shape, at.channel, !centre, about, sums);
            const double origin[OWN] = {};
            if (!exact_enough(sums)) sum_share_in_double(from, at.shape, at.channel, !centre, origin, about, sums);
            const double count = centre ? 0 : static_cast<double>(packs * (VEC / OWN));
#pragma unroll
            for (int k = 0; k < OWN; ++k) sums.of[0][k] = fused(count, exactly(about[k]), sums.of[0][k]);
        }
        write_sums(sums.of, column, Shape{1, of.columns(), 1}, partials, tile);
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_group_centre(
    const double* partials, double* centre, i64 shares, i64 samples, i64 channels, i64 space,
    i64 width
) {
    __shared__ Pair<double> slots[2 * WARP];
    const Extent of = {samples, channels, space, width};
    const i64 groups = of.columns() / width, step = static_cast<i64>(gridDim.x) * blockDim.y;
    i64 first = static_cast<i64>(blockIdx.x) * blockDim.y;
    for (int turn = 0; first < groups; first += step, ++turn) {
        const i64 group = first + threadIdx.y;
        Pair<double> total = {0, 0};
        if (group < groups) total = share_of_group<PARAM_T>(partials, nullptr, shares, group, of);
        total = row_sums(total, slots, turn);
        if (threadIdx.x == 0 && group < groups)
            centre[group] = exactly(narrow<A>(total.first / (width * space)));
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_group_moments(
    const double* partials, const double* centre, double* exact, STAT_T* mean, STAT_T* inv_std,
    i64 shares, i64 samples, i64 channels, i64 space, i64 width, double eps
) {
    __shared__ Pair<double> slots[2 * WARP];
    const Extent of = {samples, channels, space, width};
    const i64 groups = of.columns() / width, step = static_cast<i64>(gridDim.x) * blockDim.y;
    i64 first = static_cast<i64>(blockIdx.x) * blockDim.y;
    for (int turn = 0; first < groups; first += step, ++turn) {
        const i64 group = first + threadIdx.y;
        Pair<double> total = {0, 0};
        if (group < groups) total = share_of_group<PARAM_T>(partials, nullptr, shares, group, of);
        total = row_sums(total, slots, turn);
        if (threadIdx.x != 0 || group >= groups) continue;
        const double count = static_cast<double>(width * space), correction = total.first / count;
        const double variance = fused(-correction, correction, total.second / count);
        const double middle = centre[group] + correction;
        const double factor = 1 / sqrt((variance < 0 ? 0 : variance) + eps);
        exact[group] = middle;
        exact[groups + group] = factor;
        mean[group] = narrow<STAT_T>(middle);
        inv_std[group] = narrow<STAT_T>(factor);
    }
}

__device__ __forceinline__ void load_parameters(
    const PARAM_T* scale, const PARAM_T* bias, const double* exact, i64 column, const Extent& of,
    Parameters& own
) {
    Real<double> mean[OWN], inv_std[OWN];
    load_groups(exact, column, of, Real<double>{0}, mean);
    load_groups(exact + of.columns() / of.width, column, of, Real<double>{0}, inv_std);
    load_channels(scale, column, of, A{1}, own.scale);
    load_channels(bias, column, of, A{0}, own.bias);
    set_statistics(mean, inv_std, own);
}

extern "C" __global__ void __launch_bounds__(256, 2) normalize_groups(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, const double* exact, DATA_T* y,
    i64 samples, i64 channels, i64 space, i64 width
) {
    const Extent of = {samples, channels, space, width};
    for (i64 column = first_channel(); column < of.columns(); column += channel_step()) {
        Parameters own;
        load_parameters(scale, bias, exact, column, of, own);
        const Place at(of, column);
        for (Walk walk(at.shape); walk.inside(at.shape);) {
            const Places places(walk, at.shape, at.channel);
            const Packs packs = fetch_packs(x + at.start, places);
#pragma unroll
            for (int b = 0; b < AT_ONCE; ++b)
                if (b < places.count) normalize_pack(packs.at[b], own, y + at.start + places.at[b]);
        }
    }
}
