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
// are 16-byte aligned. If CHUNKS, x * CHUNKS * VEC >= width: a thread then reads its part of a row
// once, all at once, and keeps it in registers. With CHUNKS = 0 a row has any length and is read
// for each of its sums and again for y.

#include "packs.cuh"
#include "rows.cuh"

typedef Wide<DATA_T>::type A;

// A thread's part of a row.
struct Row {
    const DATA_T* x;
    i64 width;  // 0 for a row beyond the last
#if CHUNKS
    Raw<DATA_T, VEC> held[CHUNKS];
#endif
};

// The first column of a thread's k-th pack.
__device__ __forceinline__ i64 column_of(i64 k) { return (k * blockDim.x + threadIdx.x) * VEC; }

__device__ __forceinline__ Row fetch_row(const DATA_T* x, i64 width) {
    Row row = {x, width};
#if CHUNKS
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) row.held[k] = fetch_if<VEC>(column_of(k) < width, x + column_of(k), DATA_T{});
#endif
    return row;
}

// Calls visit(column, its VEC elements) for each of the thread's packs.
template <typename F> __device__ __forceinline__ void for_each_pack(const Row& row, F visit) {
    A x[VEC];
#if CHUNKS
#pragma unroll
    for (int k = 0; k < CHUNKS; ++k) {
        if (column_of(k) >= row.width) continue;
        widen(row.held[k], x);
        visit(column_of(k), x);
    }
#else
    for (i64 k = 0; column_of(k) < row.width; ++k) {
        load<VEC>(row.x + column_of(k), x);
        visit(column_of(k), x);
    }
#endif
}

// The thread's share of the sums of (x - centre) and of its square over a row.
__device__ __forceinline__ Pair<double> share_of_moments(const Row& row, double centre) {
    Pair<double> sums = {0, 0};
    for_each_pack(row, [&](i64, const A (&x)[VEC]) {
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const double deviation = exactly(x[k]) - centre;
            sums.first += deviation;
            sums.second = fused(deviation, deviation, sums.second);
        }
    });
    return sums;
}

struct Moments { double mean, variance; };

// All threads of the block must call it, also for a row beyond the last.
__device__ __forceinline__ Moments moments_of(const Row& row, i64 width, Pair<double>* slots, int& turn) {
    double centre = 0;
    if (CENTRED) centre = row_sums(share_of_moments(row, 0), slots, turn++).first / width;
    const Pair<double> sums = row_sums(share_of_moments(row, centre), slots, turn++);
    const double correction = CENTRED ? sums.first / width : 0;
    const double variance = fused(-correction, correction, sums.second / width);
    return {centre + correction, variance < 0 ? 0 : variance};
}

__device__ __forceinline__ void normalize_row(
    const Row& row, const PARAM_T* scale, const PARAM_T* bias, DATA_T* y, double mean, A inv_std
) {
    // The mean in two parts: a single one is off by half a unit in the last place, which may be
    // large compared with x - mean.
    const A high = narrow<A>(mean), low = narrow<A>(mean - exactly(high));
    for_each_pack(row, [&](i64 column, const A (&x)[VEC]) {
        A values[VEC], factor[VEC], offset[VEC];
        load_or<VEC>(scale, column, A{1}, factor);
        load_or<VEC>(bias, column, A{0}, offset);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            values[k] = CENTRED ? x[k] - high - low : x[k];
            values[k] = fused(values[k] * inv_std, factor[k], offset[k]);
        }
        store<VEC>(y + column, values);
    });
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
        const Row own = fetch_row(x + row * width, inside ? width : 0);
        const Moments of = moments_of(own, width, slots, turn);
        if (!inside) continue;
        const double factor = 1 / sqrt(of.variance + eps);
        if (threadIdx.x == 0) {
            if (CENTRED) mean[row] = narrow<STAT_T>(of.mean);
            inv_std[row] = narrow<STAT_T>(factor);
        }
        normalize_row(own, scale, bias, y + row * width, of.mean, narrow<A>(factor));
    }
}
