// Adds the partial rows of a norm's gradient into dscale and dbias.
//
//   first[sample][column]  = sum over row of partials[0][sample][row][column]
//   second[sample][column] = sum over row of partials[1][sample][row][column]
//
// partials: (planes, samples, count, width) of ACC_T, C order; count may be 0. first, second:
// (samples, width) of PARAM_T, written with = and rounded once; either may be null. Deterministic: the order of the
// additions depends only on count and y.
//
// Launch: blockDim = (x, y), y a power of two and x * y at most 1024; gridDim = (ceil(width / x) or
// fewer, planes, samples). It may start before the kernel that writes the partials has ended.

#include "columns.cuh"
#include "dependent.cuh"

typedef Wide<ACC_T>::type A;

extern "C" __global__ void __launch_bounds__(1024, 1) column_sums(
    const A* partials, PARAM_T* first, PARAM_T* second, i64 count, i64 width
) {
    wait_for_kernels_in_front();
    __shared__ A tile[1024];
    PARAM_T* out = blockIdx.y ? second : first;
    if (!out) return;
    const A* plane = partials + (blockIdx.y * gridDim.z + blockIdx.z) * count * width;
    out += blockIdx.z * width;
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 start = static_cast<i64>(blockIdx.x) * blockDim.x; start < width; start += step) {
        const i64 column = start + threadIdx.x;
        const A total = column_total(plane, count, width, column, tile);
        if (threadIdx.y == 0 && column < width) out[column] = narrow<PARAM_T>(total);
    }
}
