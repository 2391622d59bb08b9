// The gradients of layer_norm_grad.cu for rows of any length: first the rows' sums, then dx and
// partials.
//
//   row_sums_of_gradient: sums[part][row] = (sum of w, sum of w * xhat) over part of the columns
//   apply_gradient:       dx as in layer_norm_grad.cu, and partials[plane][blockIdx.y][column]
//
// Arrays as in layer_norm_grad.cu. sums: (parts, samples * rows) pairs of double, parts = gridDim.y
// of row_sums_of_gradient, 0 without dx. partials: (PLANES, samples, gridDim.y of apply_gradient, width) of the
// accumulation dtype, or null. All outputs are written with =. Deterministic: fixed orders, no atomics.
//
// Launch: blockDim = (256, 1); any grid. row_sums_of_gradient: gridDim.x runs over rows, gridDim.y
// over columns; apply_gradient: gridDim.x over columns, gridDim.y over rows; gridDim.z as in
// layer_norm_grad.cu. If VEC > 1, width is a
// multiple of VEC and arrays are aligned for packs (with a `layout`, only scale, bias and partials).

#include "registers.cuh"
#include "row_gradient.cuh"

__device__ __forceinline__ Parameters fetch_parameters(const Arrays& in, bool wanted, i64 column) {
    return {
        fetch_if<VEC>(wanted && in.scale, in.scale + column, narrow<PARAM_T>(A{1})),
        fetch_if<VEC>(HAS_BIAS && wanted && in.bias, in.bias + column, PARAM_T{}),
    };
}

// The rows of all samples together.
__device__ __forceinline__ i64 all_rows(i64 rows) { return FURTHER ? rows * gridDim.z : rows; }

__device__ __forceinline__ Part fetch_part(const Arrays& in, bool wanted, const Place& row, i64 width, i64 column) {
    return {
        fetch_data(wanted, in.dy + start_of(in.layout, DY, row, width) + column),
        fetch_data(wanted, in.source + start_of(in.layout, SOURCE, row, width) + column),
    };
}

// Packs loaded at once, and blocks that are resident: as many as there are registers for. A norm's output takes
// a bias, or a division, beside scale; so do packs that are put together of smaller accesses.
constexpr int EACH = 2 * words<Raw<DATA_T, VEC>>() + (1 + FROM_OUTPUT) * words<Raw<PARAM_T, VEC>>();
constexpr int OTHERS = needed(1) + (FROM_OUTPUT ? 8 : 0) + (PIECE < VEC ? 16 : 0);
constexpr int PACKS = OTHERS + AT_ONCE * EACH <= registers(256, 2) ? AT_ONCE : AT_ONCE / 2;
constexpr int BLOCKS = OTHERS + PACKS * EACH <= registers(256, 3) ? 3 : 2;

// The thread's share of a row's sums: within a pack in the accumulation dtype, then in double.
__device__ __forceinline__ Pair<double> share_of_row(const Arrays& in, i64 row, i64 width) {
    const i64 step = static_cast<i64>(gridDim.y) * blockDim.x * VEC;
    const Statistics of = statistics_of(in, row);
    const Place place = place_of(in.layout, row);
    Pair<double> total = {0, 0};
    i64 column = (static_cast<i64>(blockIdx.y) * blockDim.x + threadIdx.x) * VEC;
    for (; column < width; column += PACKS * step) {
        Parameters own[PACKS];
        Part at[PACKS];
#pragma unroll
        for (int b = 0; b < PACKS; ++b) {
            const i64 own_column = column + b * step;
            own[b] = fetch_parameters(in, own_column < width, own_column);
            at[b] = fetch_part(in, own_column < width, place, width, own_column);
        }
#pragma unroll
        for (int b = 0; b < PACKS; ++b) {
            if (column + b * step >= width) continue;
            Pair<A> sums = {0, 0};
#pragma unroll
            for (int k = 0; k < VEC; k += ABREAST)
                add_to_row(elements_at(in.layout, at[b], own[b], of, k), sums);
            total.first += exactly(sums.first);
            total.second += exactly(sums.second);
        }
    }
    return total;
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS) row_sums_of_gradient(
    const DATA_T* dy, const DATA_T* source, const PARAM_T* scale, const PARAM_T* bias,
    const STAT_T* mean, const STAT_T* inv_std, double* sums, i64 rows, i64 width
    FURTHER_PARAMETERS
) {
    FURTHER_VARIABLES
    __shared__ Pair<double> slots[2 * WARP];
    const Arrays in = {dy, source, of_sample(scale, width), bias, mean, inv_std, ds, layout};
    const i64 end = (sample() + 1) * rows;
    int turn = 0;
    for (i64 row = sample() * rows + blockIdx.x; row < end; row += gridDim.x) {
        const Pair<double> total = row_sums(share_of_row(in, row, width), slots, turn++);
        if (threadIdx.x != 0) continue;
        double* to = sums + 2 * (blockIdx.y * all_rows(rows) + row);
        to[0] = total.first;
        to[1] = total.second;
    }
}

__device__ __forceinline__ Pair<A> means_of_row(
    const double* sums, int parts, i64 row, i64 rows, i64 width
) {
    Pair<double> total = {0, 0};
#pragma unroll 1
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
    const Parameters own = fetch_parameters(in, true, column);
    const i64 end = (sample() + 1) * rows;
    i64 first = sample() * rows + blockIdx.y;
    for (; first < end; first += static_cast<i64>(AT_ONCE) * gridDim.y) {
        Part at[AT_ONCE];
        RawStatistics statistics[AT_ONCE];
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) {
            const i64 row = first + static_cast<i64>(b) * gridDim.y;
            at[b] = fetch_part(in, row < end, place_of(in.layout, row), width, column);
            statistics[b] = fetch_statistics(in, row < end, row);
        }
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) {
            const i64 row = first + static_cast<i64>(b) * gridDim.y;
            if (row >= end) continue;
            const Statistics of = widen(statistics[b]);
            const Pair<A> means = means_of_row(sums, parts, row, all_rows(rows), width);
            const Place place = place_of(in.layout, row);
            Raw<DATA_T, VEC> further = {};
            if (ADDED) {
                const DATA_T* ds = in.ds + start_of(in.layout, DS, place, width) + column;
                further = fetch_data(true, ds);
            }
            A out[VEC];
#pragma unroll
            for (int k = 0; k < VEC; k += ABREAST) {
                const Elements e = elements_at(in.layout, at[b], own, of, k);
                add_to_columns(e, [&](int plane, int i) -> A& { return totals[plane][k + i]; });
                put_numbers(out, k, gradient(e, means, of.inv_std, numbers_at(further, k)));
            }
            if (ADDED || dx) store_data(dx + start_of(in.layout, DX, place, width) + column, out);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) apply_gradient(
    const DATA_T* dy, const DATA_T* source, const PARAM_T* scale, const PARAM_T* bias,
    const STAT_T* mean, const STAT_T* inv_std, const double* sums, DATA_T* dx, A* partials,
    i64 rows, i64 width, int parts
    FURTHER_PARAMETERS
) {
    FURTHER_VARIABLES
    const Arrays in = {dy, source, of_sample(scale, width), bias, mean, inv_std, ds, layout};
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
            const i64 row = partials_before(plane, gridDim.y) + blockIdx.y;
            store<VEC>(partials + row * width + column, totals[plane]);
        }
    }
}
