// Gradients of RMS norm with an activated gate (gated_rms_norm.cu). With a = act(gate):
//
//   BEFORE = 1: xhat = x * inv_std,      u = dy * a
//   BEFORE = 0: xhat = x * a * inv_std,  u = dy
//   w = u * scale,  dsource = inv_std * (w - xhat * mean(w * xhat))
//   BEFORE = 1: dx = dsource,      dgate = dy * xhat * scale * act'(gate)
//   BEFORE = 0: dx = dsource * a,  dgate = dsource * x * act'(gate)
//   partials[block][column] = sum over the block's rows of u * xhat
//
// dy, x, gate, dx, dgate: (rows, width) of DATA_T, strided by `layout`, in this order; dx may be dy
// or x, dgate may be dy or gate. If LACKING, each may be null, which is not wanted then. scale: width
// of PARAM_T or null. inv_std: rows of STAT_T. partials: (gridDim.x, width) of the accumulation
// dtype, or null if dscale is not wanted. All outputs are written with =. Deterministic: fixed
// orders, no atomics.
//
// Launch: as gated_rms_norm.cu. With CHUNKS, a thread keeps the sums of its columns in registers;
// without, y is 1, and sums are kept in partials.

#include "gated.cuh"
#include "registers.cuh"

#ifndef LACKING
#define LACKING 0
#endif

// The numbers of arrays in the layout.
enum { DY, X, GATE, DX, DGATE };

struct Row {
    const DATA_T *dy, *x, *gate;
    const PARAM_T* scale;
    DATA_T *dx, *dgate;
    bool has_dx, has_dgate;
    A inv_std;
    i64 width;  // 0 for a row beyond the last
};

// A pack of a row, as memory has it.
struct Part {
    Raw<DATA_T, VEC> dy, x, gate;
    Scale scale;
};

// Beside four packs of a row, ptxas would spill; gate first beside two of 16 bits too, from compute capability 10.0 on,
// and if LACKING with a wider scale.
constexpr bool BESIDE_TWO = SINCE_10 || (LACKING && VEC * sizeof(PARAM_T) == 32);
constexpr bool SCALE_LATE = CHUNKS == 4 || (CHUNKS == 2 && BESIDE_TWO && !BEFORE && sizeof(DATA_T) == 2);

__device__ __forceinline__ Part fetch_part(const Row& row, i64 column) {
    const bool inside = column < row.width;
    return {
        fetch_data(inside, row.dy + column),
        fetch_data(inside, row.x + column),
        fetch_data(inside, row.gate + column),
        fetch_scale(inside && !SCALE_LATE, row.scale, column),
    };
}

// What the outputs need of a pack beside the row's mean. The activation's value and slope are needed
// unless BEFORE: then dgate does not depend on the mean.
struct Terms {
    Raw<DATA_T, VEC> x;
    A w[VEC], factor[VEC], slope[VEC];

    __device__ __forceinline__ Terms() {}
    __device__ __forceinline__ Terms(const Part& at, const A (&scale)[VEC], int silu) : x(at.x) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const Activated gate = activated(widen(at.gate.at(i)), silu);
            factor[i] = gate.value;
            slope[i] = gate.slope;
            w[i] = u(at, i) * scale[i];
        }
    }
    __device__ __forceinline__ A u(const Part& at, int i) const {
        const A dy = widen(at.dy.at(i));
        return BEFORE ? dy * factor[i] : dy;
    }
    __device__ __forceinline__ A xhat(int i, A inv_std) const {
        const A own = widen(x.at(i));
        return (BEFORE ? own : own * factor[i]) * inv_std;
    }
};

// A pack's sum of w * xhat.
__device__ __forceinline__ double sum_of_products(const Terms& of, A inv_std) {
    A sum = {0};
#pragma unroll
    for (int i = 0; i < VEC; ++i) sum = fused(of.w[i], of.xhat(i, inv_std), sum);
    return exactly(sum);
}

// What does not depend on the mean: adds to the sums of a pack's columns, and writes dgate if BEFORE.
__device__ __forceinline__ void write_early(
    const Row& row, i64 column, const Part& at, const Terms& of, const A (&scale)[VEC], A (&sums)[VEC]
) {
    A dgate[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        const A xhat = of.xhat(i, row.inv_std);
        sums[i] = fused(of.u(at, i), xhat, sums[i]);
        dgate[i] = widen(at.dy.at(i)) * xhat * scale[i] * of.slope[i];
    }
    if (BEFORE && (!LACKING || row.has_dgate)) store_data(row.dgate + column, dgate);
}

__device__ __forceinline__ void write_late(const Row& row, i64 column, const Terms& of, A mean) {
    A dx[VEC], dgate[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        const A dsource = row.inv_std * (of.w[i] - of.xhat(i, row.inv_std) * mean);
        dx[i] = BEFORE ? dsource : dsource * of.factor[i];
        dgate[i] = dsource * widen(of.x.at(i)) * of.slope[i];
    }
    if (!LACKING || row.has_dx) store_data(row.dx + column, dx);
    if (!BEFORE && (!LACKING || row.has_dgate)) store_data(row.dgate + column, dgate);
}

extern "C" __global__ void __launch_bounds__(512, 1) gated_rms_norm_grad(
    const DATA_T* dy, const DATA_T* x, const DATA_T* gate, const PARAM_T* scale,
    const STAT_T* inv_std, DATA_T* dx, DATA_T* dgate, A* partials, i64 rows, i64 width, int silu,
    const __grid_constant__ Layout layout
) {
    __shared__ double slots[2 * WARP];
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    const double share = 1.0 / width;
    const bool has_late = !LACKING || dx || (!BEFORE && dgate);  // what depends on a row's mean
    A* own = partials ? partials + blockIdx.x * width : nullptr;
#if CHUNKS
    __shared__ A tile[MERGED_THREADS * VEC];
    A sums[CHUNKS][VEC];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) fill<VEC>(sums[c], A{0});
#endif
    i64 first = static_cast<i64>(blockIdx.x) * blockDim.y;
    for (int turn = 0; first < rows; first += step, ++turn) {
        const i64 number = first + threadIdx.y;
        const bool inside = number < rows;
        const Place place = place_of(layout, number);
        const Row row = {
            dy + start_of(layout, DY, place, width), x + start_of(layout, X, place, width),
            gate + start_of(layout, GATE, place, width), scale, dx + start_of(layout, DX, place, width),
            dgate + start_of(layout, DGATE, place, width), dx != nullptr, dgate != nullptr,
            inside ? widen(inv_std[number]) : A{0}, inside ? width : 0,
        };
        double total = 0;
#if CHUNKS
        Part part[CHUNKS];
        Terms terms[CHUNKS];
        if (!BEFORE_8)  // there, ptxas would spill
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) part[c] = fetch_part(row, column_of(c));
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 column = column_of(c);
            if (column >= row.width) continue;
            if (BEFORE_8) part[c] = fetch_part(row, column);
            A factors[VEC];
            widen_scale(layout, SCALE_LATE ? fetch_scale(true, scale, column) : part[c].scale, factors);
            terms[c] = Terms(part[c], factors, silu);
            total += sum_of_products(terms[c], row.inv_std);
            write_early(row, column, part[c], terms[c], factors, sums[c]);
        }
#else
        for (i64 k = 0; has_late && column_of(k) < row.width; ++k) {
            const Part part = fetch_part(row, column_of(k));
            A factors[VEC];
            widen_scale(layout, part.scale, factors);
            total += sum_of_products(Terms(part, factors, silu), row.inv_std);
        }
#endif
        const A mean = has_late ? narrow<A>(__dmul_rn(row_sums(total, slots, turn), share)) : A{0};
#if CHUNKS
        if (!has_late) continue;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
            if (column_of(c) < row.width) write_late(row, column_of(c), terms[c], mean);
#else
        for (i64 k = 0; column_of(k) < row.width; ++k) {
            const i64 column = column_of(k);
            const Part part = fetch_part(row, column);
            A sums[VEC], factors[VEC];
            fill<VEC>(sums, A{0});
            if (partials && turn) load<VEC>(own + column, sums);
            widen_scale(layout, part.scale, factors);
            const Terms terms(part, factors, silu);
            write_early(row, column, part, terms, factors, sums);
            if (has_late) write_late(row, column, terms, mean);
            if (partials) store<VEC>(own + column, sums);
        }
#endif
    }
#if CHUNKS
    if (!partials) return;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (blockDim.y > 1) merge_rows(sums[c], tile);
        if (threadIdx.y == 0 && column_of(c) < width) store<VEC>(own + column_of(c), sums[c]);
    }
#endif
}
