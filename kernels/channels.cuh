// Arrays of (before, channels, after) in C order, divided among blocks by channel.
//
// Macros: DATA_T; VEC, the number of elements per access; LAST (1: after is 1, so adjacent elements
// belong to adjacent channels; 0: adjacent elements belong to one channel; 2: those of a pack may
// belong to two, for images of odd sizes).
//
// Blocks are (x, y): threadIdx.x selects a channel of the block, threadIdx.y a share of its
// elements. blockIdx.x runs over channels, blockIdx.y over shares. If LAST is 2, a block has VEC
// adjacent channels, which are `after` packs, one for each threadIdx.x; channels is a multiple of VEC,
// and VEC <= after = blockDim.x.

#pragma once

#include "columns.cuh"
#include "packs.cuh"

typedef Wide<DATA_T>::type A;

// The number of channels that one pack of elements covers.
#define OWN (LAST ? VEC : 1)

struct Shape {
    i64 before, channels, after;

    // The names that an Extent of groups.cuh has, whose columns are not its channels.
    __device__ __forceinline__ i64 columns() const { return channels; }
    __device__ __forceinline__ i64 statistics() const { return channels; }
    __device__ __forceinline__ i64 run() const { return after; }
};

// The place of a thread's columns: channels of an array that begins at `start`.
struct Place {
    i64 start, channel;
    Shape shape;
};

// The packs of a block's columns if LAST is 2: `start` is where the thread's lies in the first run.
__device__ __forceinline__ Place place_across(const Shape& of, i64 column) {
    const i64 first = column / VEC * VEC;
    return {first * of.after + threadIdx.x * VEC, 0, of};
}

__device__ __forceinline__ Place place_of(const Shape& of, i64 column) {
    if (LAST == 2) return place_across(of, column);
    return {0, column, of};
}

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

// The first channel of the thread among those of its block, in runs of `run` elements; the first of
// all, and the distance to its next one.
__device__ __forceinline__ i64 channel_in_block(i64 run) {
    return LAST == 2 ? threadIdx.x * VEC / static_cast<u32>(run) : threadIdx.x * OWN;
}
__device__ __forceinline__ i64 channels_of_block() { return LAST == 2 ? VEC : blockDim.x * OWN; }
__device__ __forceinline__ i64 first_channel(i64 run) {
    return blockIdx.x * channels_of_block() + channel_in_block(run);
}
__device__ __forceinline__ i64 channel_step() { return gridDim.x * channels_of_block(); }

// The number of elements of a thread's pack in the first of its two channels, if LAST is 2.
__device__ __forceinline__ int of_first_channel(i64 run) {
    return static_cast<int>(run) - static_cast<int>(threadIdx.x * VEC % static_cast<u32>(run));
}

// Calls `visit` with k and the distance from a thread's first channel to that of its element k.
template <typename Visit> __device__ __forceinline__ void each_own(i64 run, Visit visit) {
    const int first = LAST == 2 ? of_first_channel(run) : 0;
#pragma unroll
    for (int k = 0; k < OWN; ++k) visit(k, LAST == 2 ? k >= first : k);
}

// One number for each of a thread's channels; `absent` beyond the last, or if `from` is null.
template <typename T, typename V>
__device__ __forceinline__ void load_own(
    const T* from, i64 channel, const Shape& shape, V absent, V (&to)[OWN]
) {
    each_own(shape.after, [&](int k, int next) {
        to[k] = from && channel + next < shape.channels ? widen(from[channel + next]) : absent;
    });
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
#define TILE (LAST == 2 ? 2 * BLOCK_THREADS : BLOCK_THREADS)

// The totals of a block's packs by channel, if LAST is 2. `tile` has two for each thread: of its first
// channel, then of its second.
template <typename T>
__device__ __forceinline__ void write_parts_across(
    const T (&own)[OWN], i64 column, i64 run, T* parts, T* tile
) {
    const u32 threads = blockDim.x * blockDim.y, thread = threadIdx.y * blockDim.x + threadIdx.x;
    const int first = of_first_channel(run);
    T both[2] = {};
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        T total = k < first ? both[0] : both[1];
        total += own[k];
        both[0] = k < first ? total : both[0];
        both[1] = k < first ? both[1] : total;
    }
    tile[thread] = both[0];
    tile[threads + thread] = both[1];
    __syncthreads();
    for (u32 channel = thread; channel < VEC; channel += threads) {
        const u32 from = channel * blockDim.x;
        T total = {};
        for (u32 pack = from / VEC; pack * VEC < from + blockDim.x; ++pack) {
            const T* at = tile + (pack * VEC < from) * threads + pack;
            for (u32 y = 0; y < blockDim.y; ++y) total += at[y * blockDim.x];
        }
        parts[column / VEC * VEC + channel] = total;
    }
    __syncthreads();  // `tile` may be written again
}

// Writes the block's totals for each of its columns into its row of partial results, (gridDim.y, columns).
// All threads of the block must call it.
template <typename T>
__device__ __forceinline__ void write_parts(
    const T (&own)[OWN], i64 column, i64 columns, i64 run, T* parts, T* tile
) {
    T* const row = parts + blockIdx.y * columns;
    if (LAST == 2) return write_parts_across(own, column, run, row, tile);
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        const T total = share_total(own[k], tile);
        if (threadIdx.y == 0 && column + k < columns) row[column + k] = total;
    }
}

// The same of two sums, in both planes of partial sums: (2, gridDim.y, columns).
__device__ __forceinline__ void write_sums(
    const double (&sums)[2][OWN], i64 column, i64 columns, i64 run, double* partials, double* tile
) {
#pragma unroll
    for (int plane = 0; plane < 2; ++plane)
        write_parts(sums[plane], column, columns, run, partials + plane * gridDim.y * columns, tile);
}
