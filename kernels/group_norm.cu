// Group norm forward: y = (x - mean) * inv_std * scale + bias, with statistics of each sample's
// groups of channels.
//
//   column_moments:       as channel_moments of batch_norm.cu, of each column
//   finish_group_moments: mean, inv_std of each group
//   normalize_groups:     y
//
// x, y: (samples, channels, space), or (samples, space, channels) if LAST, of DATA_T, C order; y
// may be x. A group is `width` adjacent channels; groups are numbered sample by sample. scale,
// bias: channels of PARAM_T or null. mean, inv_std: groups of STAT_T. parts: (shares, columns) of
// Moments, shares = gridDim.y of column_moments, columns = samples * channels. exact: (3, groups) of
// double: the mean in two numbers, and inv_std, before rounding. All outputs are written with =.
// Deterministic: fixed orders, no atomics. No size is 0.
//
// Launch: column_moments and normalize_groups as in channels.cuh, with columns instead of channels,
// blockDim.x * blockDim.y at most 256, blockDim.y a power of two; any grid. If VEC > 1, arrays are
// aligned for packs and space (channels if LAST) is a multiple of VEC. finish_group_moments: blockDim =
// (threads per group, groups), x a power of two, x * y a multiple of 32 and at most 256; any gridDim.x.

#include "channel_forward.cuh"
#include "channel_moments.cuh"
#include "groups.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) column_moments(
    const DATA_T* x, Moments* parts, i64 samples, i64 channels, i64 space, i64 width
) {
    __shared__ Moments tile[TILE];
    write_moments(x, parts, Extent{samples, channels, space, width}, tile);
}

extern "C" __global__ void __launch_bounds__(256, 2) finish_group_moments(
    const Moments* parts, double* exact, STAT_T* mean, STAT_T* inv_std, i64 shares, i64 samples,
    i64 channels, i64 space, i64 width, double eps
) {
    const Extent of = {samples, channels, space, width};
    const auto load = [&](bool inside, i64 place, i64) { return inside ? parts[place] : Moments{}; };
    each_group_total<Moments>(shares, of, load, [&](i64 group, const Moments& total) {
        write_statistics(total, group, of.statistics(), eps, exact, mean, inv_std);
    });
}

extern "C" __global__ void __launch_bounds__(256, 2) normalize_groups(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, const double* exact, DATA_T* y,
    i64 samples, i64 channels, i64 space, i64 width
) {
    normalize_columns(x, scale, bias, exact, y, Extent{samples, channels, space, width});
}
