// Group norm forward: y = (x - mean) * inv_std * scale + bias, with statistics of each sample's
// groups of channels.
//
//   sum_group_deviations: partials[0] = sums of x - centre over each column, partials[1] = sums of
//                         its square (if centre is null of x alone; and, if DATA_T is f64, of
//                         (x - x0) * 2^-64, where x0 is the group's first element)
//   finish_group_centre:  centre = totals[0] / n over each group; where f64 overflows,
//                         x0 + totals[1] / n * 2^64
//   finish_group_moments: mean = centre + totals[0] / n, variance = totals[1] / n - (totals[0] / n)^2
//   normalize_groups:     y
//
// sum_group_deviations runs twice and sums in the same way as sum_deviations of batch_norm.cu.
//
// x, y: (samples, channels, space), or (samples, space, channels) if LAST, of DATA_T, C order; y
// may be x. A group is `width` adjacent channels; groups are numbered sample by sample. scale,
// bias: channels of PARAM_T or null. mean, inv_std: groups of STAT_T. partials: (2, shares,
// columns) of double, shares = gridDim.y of sum_group_deviations, columns = samples * channels.
// centre: groups of double. exact: (2, groups) of double, mean and inv_std before rounding. All
// outputs are written with =. Deterministic: fixed orders, no atomics. No size is 0.
//
// Launch: sum_group_deviations and normalize_groups as in channels.cuh, with columns instead of
// channels, blockDim.x * blockDim.y at most 256, blockDim.y a power of two; any grid. If VEC > 1,
// arrays are aligned for packs and space (channels if LAST) is a multiple of VEC. finish_group_centre
// and finish_group_moments: blockDim = (threads per group, groups), x a power of two, x * y a
// multiple of 32 and at most 1024; any gridDim.x.

#include "channel_forward.cuh"
#include "deviations.cuh"
#include "groups.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) sum_group_deviations(
    const DATA_T* x, const double* centre, double* partials, i64 samples, i64 channels, i64 space,
    i64 width
) {
    __shared__ double tile[TILE];
    sum_columns(x, centre, partials, Extent{samples, channels, space, width}, tile);
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_group_centre(
    const DATA_T* x, const double* partials, double* centre, i64 shares, i64 samples, i64 channels,
    i64 space, i64 width
) {
    const Extent of = {samples, channels, space, width};
    const i64 count = width * space;
    each_group_total<PARAM_T>(partials, nullptr, shares, of, [&](i64 group, const Pair<double>& total) {
        const bool held = sizeof(DATA_T) < 8 || fabs(total.first) <= LARGEST;
        if (held) centre[group] = exactly(narrow<A>(total.first / count));
        else centre[group] = mean_about(to_double(x[origin_of(of, group * width)]), total.second, count);
    });
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_group_moments(
    const double* partials, const double* centre, double* exact, STAT_T* mean, STAT_T* inv_std,
    i64 shares, i64 samples, i64 channels, i64 space, i64 width, double eps
) {
    const Extent of = {samples, channels, space, width};
    const double count = static_cast<double>(width * space);
    each_group_total<PARAM_T>(partials, nullptr, shares, of, [&](i64 group, const Pair<double>& total) {
        const double distance = correction_of<A>(total.first / count, centre + group);
        write_moments(distance, total.second / count, centre, group, of.statistics(), eps, exact, mean, inv_std);
    });
}

extern "C" __global__ void __launch_bounds__(256, 2) normalize_groups(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, const double* exact, DATA_T* y,
    i64 samples, i64 channels, i64 space, i64 width
) {
    normalize_columns(x, scale, bias, exact, y, Extent{samples, channels, space, width});
}
