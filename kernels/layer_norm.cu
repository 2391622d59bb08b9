// Layer norm and RMS norm forward.
//
//   layer_norm (CENTRED = 1): y = (x - mean) * inv_std * scale + bias
//   RMS norm   (CENTRED = 0): y = x * inv_std * scale
//   inv_std = 1 / sqrt(variance + eps); in an RMS norm the mean square takes the variance's place
//
// x, y: (rows, width) of DATA_T, C order; y may be x. scale, bias: width of PARAM_T or null.
// mean (null in an RMS norm), inv_std: rows of STAT_T. All outputs are written with =.
// Deterministic: fixed orders, no atomics.
//
// Statistics are in double, so no square of a float overflows or underflows. A second pass over
// the row corrects the mean by the sum of x - mean.
//
// Launch: blockDim = (threads per row, rows per block), x a power of two, x * y a multiple of 32
// and at most 1024; any gridDim.x. width > 0. If VEC > 1, width is a multiple of VEC and arrays
// are 16-byte aligned.

#include "packs.cuh"
#include "rows.cuh"

typedef Wide<DATA_T>::type A;

// The thread's share of the sums of (x - centre) and of its square over a row.
__device__ __forceinline__ Pair<double> share_of_moments(
    const DATA_T* row, i64 width, double centre
) {
    Pair<double> sums = {0, 0};
    const i64 step = static_cast<i64>(blockDim.x) * VEC;
    for (i64 column = threadIdx.x * VEC; column < width; column += step) {
        A x[VEC];
        load<VEC>(row + column, x);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const double deviation = exactly(x[k]) - centre;
            sums.first += deviation;
            sums.second = fused(deviation, deviation, sums.second);
        }
    }
    return sums;
}

struct Moments { double mean, variance; };

// All threads of the block must call it, also for a row beyond the last (`inside` is false).
__device__ __forceinline__ Moments moments_of_row(
    const DATA_T* row, i64 width, bool inside, Pair<double>* slots, int& turn
) {
    const i64 length = inside ? width : 0;
    double centre = 0;
    if (CENTRED)
        centre = row_sums(share_of_moments(row, length, 0), slots, turn++).first / width;
    const Pair<double> sums = row_sums(share_of_moments(row, length, centre), slots, turn++);
    const double correction = CENTRED ? sums.first / width : 0;
    const double variance = fused(-correction, correction, sums.second / width);
    return {centre + correction, variance < 0 ? 0 : variance};
}

__device__ __forceinline__ void normalize_row(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, DATA_T* y, i64 width, double mean,
    A inv_std
) {
    // The mean in two parts: a single one is off by half a unit in the last place, which may be
    // large compared with x - mean.
    const A high = narrow<A>(mean), low = narrow<A>(mean - exactly(high));
    const i64 step = static_cast<i64>(blockDim.x) * VEC;
    for (i64 column = threadIdx.x * VEC; column < width; column += step) {
        A values[VEC], factor[VEC], offset[VEC];
        load<VEC>(x + column, values);
        load_or<VEC>(scale, column, A{1}, factor);
        load_or<VEC>(bias, column, A{0}, offset);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            if (CENTRED) values[k] = values[k] - high - low;
            values[k] = fused(values[k] * inv_std, factor[k], offset[k]);
        }
        store<VEC>(y + column, values);
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) layer_norm(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, DATA_T* y, STAT_T* mean,
    STAT_T* inv_std, i64 rows, i64 width, double eps
) {
    __shared__ Pair<double> slots[2 * WARP];
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    int turn = 0;
    for (i64 first = static_cast<i64>(blockIdx.x) * blockDim.y; first < rows; first += step) {
        const i64 row = first + threadIdx.y;
        const bool inside = row < rows;
        const i64 start = row * width;
        const Moments of = moments_of_row(x + start, width, inside, slots, turn);
        if (!inside) continue;
        const double factor = 1 / sqrt(of.variance + eps);
        if (threadIdx.x == 0) {
            if (CENTRED) mean[row] = narrow<STAT_T>(of.mean);
            inv_std[row] = narrow<STAT_T>(factor);
        }
        normalize_row(x + start, scale, bias, y + start, width, of.mean, narrow<A>(factor));
    }
}
