// Sums over the rows of a matrix, column by column.

#pragma once

#include "moments.cuh"
#include "reductions.cuh"

// The sum of a number of each thread over threadIdx.y, in a fixed order; threads with threadIdx.y
// == 0 get it. blockDim.y is a power of two. All threads of the block must call it. `tile` holds a
// number for each thread and may be reused as soon as this returns.
template <typename T> __device__ __forceinline__ T share_total(T value, T* tile) {
    T* own = tile + threadIdx.y * blockDim.x + threadIdx.x;
    *own = value;
    __syncthreads();
    for (unsigned half = blockDim.y / 2; half > 0; half /= 2) {
        if (threadIdx.y < half) *own += own[half * blockDim.x];
        __syncthreads();
    }
    return *own;
}

#define ROWS_AT_ONCE 4  // that a thread loads before it adds the first

// The sum of `column` over `count` rows of `width` numbers, on the terms of `share_total`. Beyond
// the last column it is 0.
template <typename T>
__device__ __forceinline__ T column_total(
    const T* rows, i64 count, i64 width, i64 column, T* tile
) {
    T total = {};
    if (column < width) {
        const i64 step = blockDim.y * width;
        const T* at = rows + threadIdx.y * width + column;
#pragma unroll 1
        for (i64 row = threadIdx.y; row < count; row += ROWS_AT_ONCE * blockDim.y, at += ROWS_AT_ONCE * step) {
            T next[ROWS_AT_ONCE];
#pragma unroll
            for (int b = 0; b < ROWS_AT_ONCE; ++b) next[b] = row + b * blockDim.y < count ? at[b * step] : T{};
#pragma unroll
            for (int b = 0; b < ROWS_AT_ONCE; ++b) total += next[b];
        }
    }
    return share_total(total, tile);
}

// Calls `visit` with a thread's columns, also beyond the last: all threads of a block visit alike.
template <typename Visit> __device__ __forceinline__ void each_column(i64 columns, Visit visit) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 start = static_cast<i64>(blockIdx.x) * blockDim.x; start < columns; start += step)
        visit(start + threadIdx.x);
}

// Writes the sums over the rows of both planes of partial sums, (2, rows, columns), rounded; an
// output that is null is not wanted.
template <typename T>
__device__ __forceinline__ void write_totals(
    const double* partials, T* first, T* second, i64 rows, i64 columns, double* tile
) {
    each_column(columns, [&](i64 column) {
#pragma unroll
        for (int plane = 0; plane < 2; ++plane) {
            T* out = plane ? second : first;
            if (!out) continue;
            const double* from = partials + plane * rows * columns;
            const double total = column_total(from, rows, columns, column, tile);
            if (threadIdx.y == 0 && column < columns) out[column] = narrow<T>(total);
        }
    });
}

// Calls `visit` with each column, its mean distance from its centre and the mean square of that, from
// the sums of `count` elements' in both planes of partial sums; by the thread with threadIdx.y == 0.
template <typename A, typename Visit>
__device__ __forceinline__ void each_moments(
    const double* partials, const double* centre, i64 rows, i64 columns, i64 count, Visit visit
) {
    __shared__ double tile[1024];
    const double* squares = partials + rows * columns;
    each_column(columns, [&](i64 column) {
        const double distance = column_total(partials, rows, columns, column, tile) / count;
        const double square = column_total(squares, rows, columns, column, tile) / count;
        if (threadIdx.y == 0 && column < columns) visit(column, correction_of<A>(distance, centre + column), square);
    });
}
