// Sums over the rows of a matrix, column by column.

#pragma once

#include "reductions.cuh"

// The sum of `column` over `count` rows of `width` numbers, in a fixed order. For blocks of
// (32, 32): all threads must call it, those with threadIdx.y == 0 get the result. `tile` holds
// 32 * 32 numbers. It does NOT begin with a barrier: no thread may still be reading `tile`.
template <typename T>
__device__ __forceinline__ T column_total(
    const T* rows, i64 count, i64 width, i64 column, T* tile
) {
    T total = {};
    if (column < width) {
        const T* at = rows + threadIdx.y * width + column;
        for (i64 row = threadIdx.y; row < count; row += WARP, at += WARP * width) total += *at;
    }
    tile[threadIdx.y * WARP + threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y != 0) return total;
    for (int y = 1; y < WARP; ++y) total += tile[y * WARP + threadIdx.x];
    return total;
}
