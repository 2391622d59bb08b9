// Arrays of (before, channels, after) in C order, divided among blocks by channel.
//
// Macros: DATA_T; VEC, the number of elements per access; LAST (1: after is 1, so adjacent elements
// belong to adjacent channels; 0: adjacent elements belong to one channel).
//
// Blocks are (x, y): threadIdx.x selects a channel of the block, threadIdx.y a share of its
// elements. blockIdx.x runs over channels, blockIdx.y over shares.

#pragma once

#include "columns.cuh"
#include "packs.cuh"

typedef Wide<DATA_T>::type A;

// The number of channels that one pack of elements covers.
#define OWN (LAST ? VEC : 1)

struct Shape {
    i64 before, channels, after;

    // As of arrays whose columns are not their channels (groups.cuh).
    __device__ __forceinline__ i64 columns() const { return channels; }
    __device__ __forceinline__ i64 statistics() const { return channels; }
};

// Where a thread's columns are: channels of an array that begins at `start`.
struct Place {
    i64 start, channel;
    Shape shape;
};

__device__ __forceinline__ Place place_of(const Shape& of, i64 column) { return {0, column, of}; }

// Visits a thread's share of the packs of its channels. It divides once, not at each step.
struct Walk {
    i64 run, pack;  // the current run of adjacent elements, and the pack in it
    i64 run_step, pack_step, packs;

    __device__ __forceinline__ explicit Walk(const Shape& shape) {
        packs = LAST ? 1 : shape.after / VEC;
        const i64 first = static_cast<i64>(blockIdx.y) * blockDim.y + threadIdx.y;
        const i64 step = static_cast<i64>(gridDim.y) * blockDim.y;
        run = first / packs;
        pack = first % packs;
        run_step = step / packs;
        pack_step = step % packs;
    }

    __device__ __forceinline__ bool inside(const Shape& shape) const { return run < shape.before; }

    __device__ __forceinline__ i64 index(const Shape& shape, i64 channel) const {
        return (run * shape.channels + channel) * shape.after + pack * VEC;
    }

    __device__ __forceinline__ void next() {
        run += run_step;
        pack += pack_step;
        if (pack < packs) return;
        pack -= packs;
        ++run;
    }
};

// The places of a thread's next packs, up to AT_ONCE; the walk goes on behind them.
struct Places {
    i64 at[AT_ONCE];
    int count;

    __device__ __forceinline__ Places(Walk& walk, const Shape& shape, i64 channel) : count(0) {
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) {
            at[b] = walk.index(shape, channel);
            if (!walk.inside(shape)) continue;
            ++count;
            walk.next();
        }
    }
};

// An array's elements there; zeros for packs that do not exist.
struct Packs { Raw<DATA_T, VEC> at[AT_ONCE]; };

__device__ __forceinline__ Packs fetch_packs(const DATA_T* from, const Places& places) {
    Packs packs;
#pragma unroll
    for (int b = 0; b < AT_ONCE; ++b)
        packs.at[b] = fetch_if<VEC>(b < places.count, from + places.at[b], DATA_T{});
    return packs;
}

// The first channel of the thread, and the distance to its next one.
__device__ __forceinline__ i64 first_channel() {
    return (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * OWN;
}
__device__ __forceinline__ i64 channel_step() {
    return static_cast<i64>(gridDim.x) * blockDim.x * OWN;
}

// One number for each of a thread's channels; `absent` beyond the last, or if `from` is null.
template <typename T, typename V>
__device__ __forceinline__ void load_own(
    const T* from, i64 channel, const Shape& shape, V absent, V (&to)[OWN]
) {
#pragma unroll
    for (int k = 0; k < OWN; ++k)
        to[k] = from && channel + k < shape.channels ? widen(from[channel + k]) : absent;
}

template <typename T, typename V>
__device__ __forceinline__ void load_statistic(
    const T* from, i64 column, const Shape& of, V absent, V (&to)[OWN]
) {
    load_own(from, column, of, absent, to);
}
template <typename T, typename V>
__device__ __forceinline__ void load_parameter(
    const T* from, i64 column, const Shape& of, V absent, V (&to)[OWN]
) {
    load_own(from, column, of, absent, to);
}

#define BLOCK_THREADS 256

// Writes the block's sums for each of its columns into its row of both planes of the partial
// sums: (2, gridDim.y, columns). All threads of the block must call it.
__device__ __forceinline__ void write_sums(
    double (&sums)[2][OWN], i64 column, i64 columns, double* partials, double* tile
) {
#pragma unroll
    for (int plane = 0; plane < 2; ++plane)
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const double total = share_total(sums[plane][k], tile);
            if (threadIdx.y != 0 || column + k >= columns) continue;
            const i64 row = static_cast<i64>(plane) * gridDim.y + blockIdx.y;
            partials[row * columns + column + k] = total;
        }
}
