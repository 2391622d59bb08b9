// RMS norm with an activated gate: SiLU, or sigmoid if `silu` is 0.
//
//   before = 1: y = x * inv_std * scale * act(gate),  inv_std = 1 / sqrt(mean of x^2 + eps)
//   before = 0: y = h * inv_std * scale,  h = x * act(gate),  inv_std from the mean of h^2
//
// x, gate, y: (rows, width) of DATA_T, strided by `layout`, in this order; y may be x or gate.
// scale: width of PARAM_T or null. inv_std: rows of STAT_T. All outputs are written with =.
// Deterministic: fixed orders, no atomics.
//
// Squares are summed in the accumulation dtype within a pack, then in double; all in double if one
// overflows or loses digits. Each thread reads its part of a row twice.
//
// Launch: blockDim = (threads per row, rows per block), x a power of two below 32 or a multiple of
// 32, x * y a multiple of 32 and at most 512; any gridDim.x. width > 0. If VEC > 1, width is a
// multiple of VEC and scale is aligned for packs.

#include "gated.cuh"

// The numbers of arrays in the layout.
enum { X, GATE, Y };

// A thread's part of a row.
struct Row {
    const DATA_T *x, *gate;
    i64 width;  // 0 for a row beyond the last
};

// What is normalised, of a thread's k-th pack.
__device__ __forceinline__ void load_source(
    const Row& row, i64 column, const Gating& how, A (&to)[VEC]
) {
    widen(fetch_data(true, row.x + column), to);
    if (how.before) return;
    A gate[VEC];
    widen(fetch_data(true, row.gate + column), gate);
#pragma unroll
    for (int i = 0; i < VEC; ++i) to[i] = to[i] * activated(gate[i], how.silu).value;
}

// The thread's share of the sum of squares over a row, all of it in double if `exact`.
__device__ __forceinline__ double share_of_squares(
    const Row& row, const Gating& how, bool exact
) {
    double sum = 0;
    for (i64 k = 0; column_of(k) < row.width; ++k) {
        A source[VEC], part = {0};
        load_source(row, column_of(k), how, source);
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            part = fused(source[i], source[i], part);
            if (exact) sum = fused(exactly(source[i]), exactly(source[i]), sum);
        }
        if (!exact) sum += exactly(part);
    }
    return sum;
}

__device__ __forceinline__ void write_row(
    const Layout& layout, const Row& row, const PARAM_T* scale, DATA_T* y, A inv_std, const Gating& how
) {
    for (i64 k = 0; column_of(k) < row.width; ++k) {
        const i64 column = column_of(k);
        A values[VEC], factor[VEC];
        load_source(row, column, how, values);
        load_scale(layout, scale, column, factor);
#pragma unroll
        for (int i = 0; i < VEC; ++i) values[i] = values[i] * inv_std * factor[i];
        if (how.before) {
            A gate[VEC];
            widen(fetch_data(true, row.gate + column), gate);
#pragma unroll
            for (int i = 0; i < VEC; ++i) values[i] = values[i] * activated(gate[i], how.silu).value;
        }
        store_data(y + column, values);
    }
}

extern "C" __global__ void __launch_bounds__(512, 2) gated_rms_norm(
    const DATA_T* x, const DATA_T* gate, const PARAM_T* scale, DATA_T* y, STAT_T* inv_std, i64 rows,
    i64 width, double eps, int silu, int before, const __grid_constant__ Layout layout
) {
    __shared__ double slots[2 * WARP];
    const Gating how = {silu, before};
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    const double share = 1.0 / width;
    i64 first = static_cast<i64>(blockIdx.x) * blockDim.y;
    for (int turn = 0; first < rows; first += step, ++turn) {
        const i64 row = first + threadIdx.y;
        const bool inside = row < rows;
        const Place place = place_of(layout, row);
        const Row own = {
            x + start_of(layout, X, place, width), gate + start_of(layout, GATE, place, width),
            inside ? width : 0,
        };
        double squares = share_of_squares(own, how, false);
        if (sizeof(DATA_T) < 8 && !squares_held(squares)) squares = share_of_squares(own, how, true);
        const double total = row_sums(squares, slots, turn);
        if (!inside) continue;
        const double factor = 1 / sqrt(__dmul_rn(total, share) + eps);
        if (threadIdx.x == 0) inv_std[row] = narrow<STAT_T>(factor);
        write_row(layout, own, scale, y + start_of(layout, Y, place, width), narrow<A>(factor), how);
    }
}
