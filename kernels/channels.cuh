// Arrays of (before, channels, after) in C order, dealt out to blocks by channel.
//
// Macros: DATA_T; VEC, the elements that one access moves; LAST (1: after is 1, so that
// adjacent elements are of adjacent channels; 0: adjacent elements are of one channel).
//
// Blocks are (x, y): a thread's x says which of the block's channels, y which share of their
// elements. blockIdx.x goes over channels, blockIdx.y over shares.

#pragma once

#include "columns.cuh"
#include "packs.cuh"

typedef Wide<DATA_T>::type A;

// How many channels one pack of elements holds.
#define OWN (LAST ? VEC : 1)

struct Shape { i64 before, channels, after; };

// A thread's walk over its share of the packs of its channels. Divides once, not at each step.
struct Walk {
    i64 run, pack;  // which run of adjacent elements, which pack in it
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

// The first channel of the thread, and how far on its next one is.
__device__ __forceinline__ i64 first_channel() {
    return (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * OWN;
}
__device__ __forceinline__ i64 channel_step() {
    return static_cast<i64>(gridDim.x) * blockDim.x * OWN;
}

// One number for each of a thread's channels; `absent` beyond the last and without an array.
template <typename T, typename V>
__device__ __forceinline__ void load_own(
    const T* from, i64 channel, const Shape& shape, V absent, V (&to)[OWN]
) {
#pragma unroll
    for (int k = 0; k < OWN; ++k)
        to[k] = from && channel + k < shape.channels ? widen(from[channel + k]) : absent;
}

#define BLOCK_THREADS 256

// Sums over the y of a block, in a fixed order; threads of threadIdx.y == 0 get them. blockDim.y
// is a power of two, blockDim.x * blockDim.y at most 256. All threads of the block must call it.
// `tile` holds 256 numbers and is free again when this returns.
__device__ __forceinline__ double share_total(double value, double* tile) {
    double* own = tile + threadIdx.y * blockDim.x + threadIdx.x;
    *own = value;
    __syncthreads();
    for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
        if (threadIdx.y < half) *own += own[half * blockDim.x];
        __syncthreads();
    }
    return *own;
}

// Adds up the block's sums for each of its channels into its row of both planes of the
// partial sums: (2, gridDim.y, channels). All threads of the block must call it.
__device__ __forceinline__ void write_sums(
    double (&sums)[2][OWN], i64 channel, const Shape& shape, double* partials, double* tile
) {
#pragma unroll
    for (int plane = 0; plane < 2; ++plane)
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            const double total = share_total(sums[plane][k], tile);
            if (threadIdx.y != 0 || channel + k >= shape.channels) continue;
            const i64 row = static_cast<i64>(plane) * gridDim.y + blockIdx.y;
            partials[row * shape.channels + channel + k] = total;
        }
}
