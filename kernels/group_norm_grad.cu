// The gradient of group norm from saved statistics, in four kernels.
//
//   xhat = (x - mean) * inv_std, w = dy * scale, n elements per group
//   sum_group_gradient:      partials[0] = sums of dy * xhat over each column, partials[1] = of dy
//   finish_group_means:      means[0] = mean of w * xhat, means[1] = mean of w over each group
//   finish_group_parameters: dscale, dbias = sums of the partials over samples
//   apply_group_gradient:    dx = inv_std * (w - means[1] - xhat * means[0])
//
// dy, x, dx: as x in group_norm.cu, with its columns and groups; dx may be dy. mean, inv_std:
// groups of STAT_T. scale: channels of PARAM_T, or null (1). dscale, dbias: channels of PARAM_T; a
// null output is not computed. partials: (2, shares, columns) of double, shares = gridDim.y of
// sum_group_gradient. means: (2, groups) of the accumulation dtype. All outputs are written with =.
// Deterministic: fixed orders, no atomics. No size is 0.
//
// Launch: sum_group_gradient and apply_group_gradient as column_moments of group_norm.cu,
// finish_group_means as its finish_group_moments. finish_group_parameters: blockDim = (x, y), y a
// power of two and x * y at most 1024; any gridDim.x.

#include "channel_gradient.cuh"
#include "groups.cuh"

__device__ __forceinline__ A dx_of(A dy, A rest, A inv_std, A scale, const Extent&) {
    return inv_std * (dy * scale - rest);
}

extern "C" __global__ void __launch_bounds__(256, 2) sum_group_gradient(
    const DATA_T* dy, const DATA_T* x, const STAT_T* mean, const STAT_T* inv_std, double* partials,
    i64 samples, i64 channels, i64 space, i64 width
) {
    __shared__ double tile[TILE];
    sum_gradient(dy, x, mean, inv_std, partials, Extent{samples, channels, space, width}, tile);
}

// A column's sums, and its channel's scale.
struct Weighted { Pair<double> sums; double scale; };

__device__ __forceinline__ void operator+=(Pair<double>& total, const Weighted& column) {
    total.first = fused(column.scale, column.sums.first, total.first);
    total.second = fused(column.scale, column.sums.second, total.second);
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_group_means(
    const double* partials, const PARAM_T* scale, A* means, i64 shares, i64 samples, i64 channels,
    i64 space, i64 width
) {
    const Extent of = {samples, channels, space, width};
    const double count = static_cast<double>(width * space);
    const double* const others = partials + shares * of.columns();
    const auto load = [&](bool inside, i64 place, i64 channel) {
        const Pair<double> sums = {inside ? partials[place] : 0, inside ? others[place] : 0};
        return Weighted{sums, inside && scale ? to_double(scale[channel]) : 1};
    };
    each_group_total<Pair<double>>(shares, of, load, [&](i64 group, const Pair<double>& total) {
        means[group] = narrow<A>(total.first / count);
        means[of.statistics() + group] = narrow<A>(total.second / count);
    });
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_group_parameters(
    const double* partials, PARAM_T* dscale, PARAM_T* dbias, i64 shares, i64 samples, i64 channels
) {
    __shared__ double tile[1024];
    write_totals(partials, dscale, dbias, shares * samples, channels, tile);
}

extern "C" __global__ void __launch_bounds__(256, 2) apply_group_gradient(
    const DATA_T* dy, const DATA_T* x, const PARAM_T* scale, const STAT_T* mean,
    const STAT_T* inv_std, const A* means, DATA_T* dx, i64 samples, i64 channels, i64 space, i64 width
) {
    const Extent of = {samples, channels, space, width};
    apply_gradient(dy, x, scale, mean, inv_std, means, dx, of);
}
