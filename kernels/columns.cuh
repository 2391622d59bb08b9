// Sums over the rows of a matrix, column by column.

#pragma once

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

// Rows that a thread loads before it adds the first; of what takes many registers, fewer.
template <typename T> constexpr int rows_at_once() { return sizeof(T) > 16 ? 2 : 4; }

// The sum of `column` over `count` rows of `width` numbers, on the terms of `share_total`. Beyond
// the last column it is 0.
template <typename T>
__device__ __forceinline__ T column_total(
    const T* rows, i64 count, i64 width, i64 column, T* tile
) {
    T total = {};
    if (column < width) {
        constexpr int ROWS = rows_at_once<T>();
        const i64 step = blockDim.y * width;
        const T* at = rows + threadIdx.y * width + column;
#pragma unroll 1
        for (i64 row = threadIdx.y; row < count; row += ROWS * blockDim.y, at += ROWS * step) {
            T next[ROWS];
#pragma unroll
            for (int b = 0; b < ROWS; ++b) next[b] = row + b * blockDim.y < count ? at[b * step] : T{};
#pragma unroll
            for (int b = 0; b < ROWS; ++b) total += next[b];
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
