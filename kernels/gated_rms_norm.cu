// RMS norm with an activated gate: SiLU, or sigmoid if `silu` is 0.
//
//   BEFORE = 1: y = x * inv_std * scale * act(gate),  inv_std = 1 / sqrt(mean of x^2 + eps)
//   BEFORE = 0: y = h * inv_std * scale,  h = x * act(gate),  inv_std from the mean of h^2
//
// x, gate, y: (rows, width) of DATA_T, strided by `layout`, in this order; y may be x or gate.
// scale: width of PARAM_T or null. inv_std: rows of STAT_T. All outputs are written with =.
// Deterministic: fixed orders, no atomics.
//
// Squares are summed in the accumulation dtype within a pack, then in double; all in double if one
// overflows or loses digits.
//
// Launch: blockDim = (threads per row, rows per block), x a power of two below 32 or a multiple of
// 32, x * y a multiple of 32 and at most 512, x * CHUNKS * VEC >= width if CHUNKS; any gridDim.x.
// width > 0. If VEC > 1, width is a multiple of VEC and scale is aligned for packs.

#include "gated.cuh"

// The numbers of arrays in the layout.
enum { X, GATE, Y };

// A thread's part of a row.
struct Row {
    const DATA_T *x, *gate;
    const PARAM_T* scale;
    i64 width;  // 0 for a row beyond the last
};

// A pack of a row, as memory has it.
struct Part {
    Raw<DATA_T, VEC> x, gate;
    Scale scale;
};

__device__ __forceinline__ Part fetch_part(const Row& row, i64 column) {
    const bool inside = column < row.width;
    return {
        fetch_data(inside, row.x + column),
        fetch_data(inside, row.gate + column),
        fetch_scale(inside, row.scale, column),
    };
}

__device__ __forceinline__ A factor_of(const Part& at, int i, int silu) {
    return activated(widen(at.gate.at(i)), silu).value;
}

// What is normalised of a pack.
__device__ __forceinline__ void load_source(const Part& at, int silu, A (&to)[VEC]) {
    widen(at.x, to);
    if (BEFORE) return;
#pragma unroll
    for (int i = 0; i < VEC; ++i) to[i] = to[i] * factor_of(at, i, silu);
}

// Adds a pack's squares to a sum: all in double if `exact`.
__device__ __forceinline__ void add_squares(const A (&source)[VEC], bool exact, double& sum) {
    A part = {0};
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        part = fused(source[i], source[i], part);
        if (exact) sum = fused(exactly(source[i]), exactly(source[i]), sum);
    }
    if (!exact) sum += exactly(part);
}

// The thread's packs of a row. Each loop over them is written once for both ways to have them.
struct Packs {
    const Row& row;
    int silu;
#if CHUNKS
    Part part[CHUNKS];
    A source[CHUNKS][VEC];  // unless BEFORE: then `part` has it

    // Issues all loads.
    __device__ __forceinline__ Packs(const Row& row, int silu) : row(row), silu(silu) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) part[c] = fetch_part(row, column_of(c));
        if (BEFORE) return;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) load_source(part[c], silu, source[c]);
    }
#else
    __device__ __forceinline__ Packs(const Row& row, int silu) : row(row), silu(silu) {}
#endif

    // Calls `visit` with each pack's first column, its elements as memory has them, and its source.
    template <typename Visit> __device__ __forceinline__ void each(Visit visit) const {
#if CHUNKS
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            A own[VEC];
            if (column_of(c) >= row.width) continue;
#pragma unroll
            for (int i = 0; i < VEC; ++i) own[i] = BEFORE ? widen(part[c].x.at(i)) : source[c][i];
            visit(column_of(c), part[c], own);
        }
#else
        for (i64 k = 0; column_of(k) < row.width; ++k) {
            A own[VEC];
            const Part at = fetch_part(row, column_of(k));
            load_source(at, silu, own);
            visit(column_of(k), at, own);
        }
#endif
    }

    // The thread's share of the sum of squares over the row, all of it in double if `exact`.
    __device__ __forceinline__ double share_of_squares(bool exact) const {
        double sum = 0;
        each([&](i64, const Part&, const A (&source)[VEC]) { add_squares(source, exact, sum); });
        return sum;
    }
};

extern "C" __global__ void __launch_bounds__(512, CHUNKS ? 1 : 2) gated_rms_norm(
    const DATA_T* x, const DATA_T* gate, const PARAM_T* scale, DATA_T* y, STAT_T* inv_std, i64 rows,
    i64 width, double eps, int silu, const __grid_constant__ Layout layout
) {
    __shared__ double slots[2 * WARP];
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    const double share = 1.0 / width;
    i64 first = static_cast<i64>(blockIdx.x) * blockDim.y;
    for (int turn = 0; first < rows; first += step, ++turn) {
        const i64 row = first + threadIdx.y;
        const bool inside = row < rows;
        const Place place = place_of(layout, row);
        const Row own = {
            x + start_of(layout, X, place, width), gate + start_of(layout, GATE, place, width), scale,
            inside ? width : 0,
        };
        const Packs packs(own, silu);
        double squares = packs.share_of_squares(false);
        if (sizeof(DATA_T) < 8 && !squares_held(squares)) squares = packs.share_of_squares(true);
        const double total = row_sums(squares, slots, turn);
        if (!inside) continue;
        const double factor = 1 / sqrt(__dmul_rn(total, share) + eps);
        if (threadIdx.x == 0) inv_std[row] = narrow<STAT_T>(factor);
        const A normal = narrow<A>(factor);
        DATA_T* to = y + start_of(layout, Y, place, width);
        packs.each([&](i64 column, const Part& at, A (&values)[VEC]) {
            A factors[VEC];
            widen_scale(layout, at.scale, factors);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                values[i] = values[i] * normal * factors[i];
                if (BEFORE) values[i] = values[i] * factor_of(at, i, silu);
            }
            store_data(to + column, values);
        });
    }
}
