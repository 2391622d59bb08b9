// Arrays of (samples, channels, space) or, if LAST, (samples, space, channels) in C order, whose
// channels are in groups of `width`. They are divided among blocks by column: the elements of one
// channel in one sample. Columns are numbered sample by sample, so those of a group are adjacent.
//
// Macros and blocks are those of channels.cuh, with columns instead of channels.

#pragma once

#include "channels.cuh"
#include "rows.cuh"

struct Extent {
    i64 samples, channels, space, width;

    __device__ __forceinline__ i64 columns() const { return samples * channels; }
    __device__ __forceinline__ i64 statistics() const { return columns() / width; }
    __device__ __forceinline__ i64 run() const { return space; }
};

// A thread's columns as channels.cuh sees them.
__device__ __forceinline__ Place place_of(const Extent& of, i64 column) {
    const Shape all = {1, of.columns(), of.space};
    if (LAST == 2) return place_across(all, column);
    const i64 sample = LAST ? column / of.channels : 0;
    Place at;
    at.start = sample * of.space * of.channels;
    at.channel = column - sample * of.channels;
    if (LAST) at.shape = {of.space, of.channels, 1};
    else at.shape = all;
    return at;
}

// The number of its group for each of a thread's columns; `absent` beyond the last, or if `from` is
// null.
template <typename T, typename V>
__device__ __forceinline__ void load_statistic(
    const T* from, i64 column, const Extent& of, V absent, V (&to)[OWN]
) {
    i64 group = column / of.width, within = column - group * of.width;
    int before = 0;
    each_own(of.space, [&](int k, int next) {
        if (next != before && ++within == of.width) {
            within = 0;
            ++group;
        }
        before = next;
        to[k] = from && column + next < of.columns() ? widen(from[group]) : absent;
    });
}

// The number of its channel for each of them. A pack has columns of one sample.
template <typename T, typename V>
__device__ __forceinline__ void load_parameter(
    const T* from, i64 column, const Extent& of, V absent, V (&to)[OWN]
) {
    const i64 channel = column % of.channels;
    each_own(of.space, [&](int k, int next) {
        to[k] = from && column + next < of.columns() ? widen(from[channel + next]) : absent;
    });
}

// The thread's share of what blocks found of a group's columns: `load` is told whether there is such a column,
// its place among all columns of all shares, and its channel.
template <typename T, typename Load>
__device__ __forceinline__ T share_of_group(i64 shares, i64 group, const Extent& of, Load load) {
    const i64 first = group * of.width, columns = of.columns(), channel = first % of.channels;
    i64 share = threadIdx.x / of.width, within = threadIdx.x % of.width;
    const i64 share_step = blockDim.x / of.width, within_step = blockDim.x % of.width;
    constexpr int ROWS = rows_at_once<T>();
    T total = {};
    while (share < shares) {
        decltype(load(true, 0, 0)) next[ROWS];
#pragma unroll
        for (int b = 0; b < ROWS; ++b) {
            next[b] = load(share < shares, share * columns + first + within, channel + within);
            share += share_step;
            within += within_step;
            if (within < of.width) continue;
            within -= of.width;
            ++share;
        }
#pragma unroll
        for (int b = 0; b < ROWS; ++b) total += next[b];
    }
    return total;
}

// Calls `visit` with each group and the total of its columns, by the thread with threadIdx.x == 0. A
// group has a row of the block, on the terms of `row_sums`.
template <typename T, typename Load, typename Visit>
__device__ __forceinline__ void each_group_total(i64 shares, const Extent& of, Load load, Visit visit) {
    __shared__ T slots[2 * WARP];
    const i64 groups = of.statistics(), step = static_cast<i64>(gridDim.x) * blockDim.y;
    i64 first = static_cast<i64>(blockIdx.x) * blockDim.y;
    for (int turn = 0; first < groups; first += step, ++turn) {
        const i64 group = first + threadIdx.y;
        T total = {};
        if (group < groups) total = share_of_group<T>(shares, group, of, load);
        total = row_sums(total, slots, turn);
        if (threadIdx.x == 0 && group < groups) visit(group, total);
    }
}
