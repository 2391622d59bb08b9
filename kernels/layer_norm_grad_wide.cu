// The gradients of layer_norm_grad.cu for rows of any length: first the rows' sums, then the rest.
//
//   row_sums_of_gradient: sums[part][row] = (sum of w, sum of w * xhat) over part of the columns
//   apply_gradient:       dx as in layer_norm_grad.cu, and partials[plane][blockIdx.y][column]
//
// Arrays as in layer_norm_grad.cu. sums: (parts, rows) pairs of double, parts = gridDim.y of
// row_sums_of_gradient. partials: (PLANES, gridDim.y of apply_gradient, width) of the accumulation
// dtype, or null. All outputs are written with =. Deterministic: fixed orders, no atomics.
//
// Launch: blockDim = (256, 1); any grid. row_sums_of_gradient: gridDim.x runs over rows, gridDim.y
// over columns; apply_gradient: gridDim.x over columns, gridDim.y over rows. If VEC > 1, width is
// a multiple of VEC and arrays are 16-byte aligned.

#include "row_gradient.cuh"

// One pack of columns of one row.
struct Part { A dy[VEC], xhat[VEC], w[VEC]; };

struct Parameters { A scale[VEC], bias[VEC]; };

__device__ __forceinline__ void load_parameters(const Arrays& in, i64 column, Parameters& own) {
    load_or<VEC>(in.scale, column, A{1}, own.scale);
    load_or<VEC>(in.bias, column, A{0}, own.bias);
}

__device__ __forceinline__ void load_part(
    const Arrays& in, i64 start, const Statistics& of, const Parameters& own, Part& at
) {
    load<VEC>(in.dy + start, at.dy);
    load<VEC>(in.source + start, at.xhat);
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
        at.xhat[k] = normalized(at.xhat[k], own.scale[k], own.bias[k], of);
        at.w[k] = at.dy[k] * own.scale[k];
    }
}

// The thread's share of a row's sums: within a pack in the accumulation dtype, then in double.
__device__ __forceinline__ Pair<double> share_of_row(const Arrays& in, i64 row, i64 width) {
    const i64 step = static_cast<i64>(gridDim.y) * blockDim.x * VEC;
    const Statistics of = statistics_of(in, row);
    Pair<double> total = {0, 0};
    i64 column = (static_cast<i64>(blockIdx.y) * blockDim.x + threadIdx.x) * VEC;
    for (; column < width; column += step) {
        Parameters own;
        Part at;
        load_parameters(in, column, own);
        load_part(in, row * width + column, of, own, at);
        Pair<A> sums = {0, 0};
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            sums.first += at.w[k];
            sums.second = fused(at.w[k], at.xhat[k], sums.second);
        }
        total.first += exactly(sums.first);
        total.second += exactly(sums.second);
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(256, 1) row_sums_of_gradient(
    const DATA_T* dy, const DATA_T* source, const PARAM_T* scale, const PARAM_T* bias,
    const STAT_T* mean, const STAT_T* inv_std, double* sums, i64 rows, i64 width
) {
    __shared__ Pair<double> slots[2 * WARP];
    const Arrays in = {dy, source, scale, bias, mean, inv_std};
    int turn = 0;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        const Pair<double> total = row_sums(share_of_row(in, row, width), slots, turn++);
        if (threadIdx.x != 0) continue;
        sums[2 * (blockIdx.y * rows + row)] = total.first;
        sums[2 * (blockIdx.y * rows + row) + 1] = total.second;
    }
}

__device__ __forceinline__ Pair<A> means_of_row(
    const double* sums, int parts, i64 row, i64 rows, i64 width
) {
    Pair<double> total = {0, 0};
    for (int part = 0; part < parts; ++part) {
        total.first += sums[2 * (part * rows + row)];
        total.second += sums[2 * (part * rows + row) + 1];
    }
    return {narrow<A>(total.first / width), narrow<A>(total.second / width)};
}

// Computes dx for one pack of columns in each of the block's rows; adds to the columns' sums.
__device__ __forceinline__ void apply_to_columns(
    const Arrays& in, const double* sums, DATA_T* dx, i64 rows, i64 width, int parts, i64 column,
    A (&totals)[PLANES][VEC]
) {
    Parameters own;
    load_parameters(in, column, own);
    for (i64 row = blockIdx.y; row < rows; row += gridDim.y) {
        const Statistics of = statistics_of(in, row);
        const Pair<A> means = means_of_row(sums, parts, row, rows, width);
        Part at;
        load_part(in, row * width + column, of, own, at);
        A out[VEC];
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            totals[0][k] = fused(at.dy[k], at.xhat[k], totals[0][k]);
            if (CENTRED) totals[PLANES - 1][k] += at.dy[k];
            out[k] = gradient(at.w[k], at.xhat[k], means, of.inv_std);
        }
        store<VEC>(dx + row * width + column, out);
    }
}

extern "C" __global__ void __launch_bounds__(256, 1) apply_gradient(
    const DATA_T* dy, const DATA_T* source, const PARAM_T* scale, const PARAM_T* bias,
    const STAT_T* mean, const STAT_T* inv_std, const double* sums, DATA_T* dx, A* partials,
    i64 rows, i64 width, int parts
) {
    const Arrays in = {dy, source, scale, bias, mean, inv_std};
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x * VEC;
    i64 column = (static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x) * VEC;
    for (; column < width; column += step) {
        A totals[PLANES][VEC];
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) fill<VEC>(totals[plane], A{0});
        apply_to_columns(in, sums, dx, rows, width, parts, column, totals);
        if (!partials) continue;
#pragma unroll
        for (int plane = 0; plane < PLANES; ++plane) {
            const i64 row = static_cast<i64>(plane) * gridDim.y + blockIdx.y;
            store<VEC>(partials + row * width + column, totals[plane]);
        }
    }
}
