// Shared by the gradients of layer norm and RMS norm, from their input or output.
//
// Macros: DATA_T, STAT_T, PARAM_T; VEC, the number of elements per access; FROM_OUTPUT (1: xhat is
// computed from the norm's output); CENTRED (0: RMS norm, without a mean); STRIDED, ADDED (1: ds,
// the gradient from the residual branch, is added to dx): row_starts.cuh.

#pragma once

#include "row_starts.cuh"
#include "rows.cuh"

typedef Wide<DATA_T>::type A;

// dscale and, unless it is an RMS norm, dbias.
#define PLANES (CENTRED ? 2 : 1)

// Whether a bias is subtracted from the norm's output.
#define HAS_BIAS (FROM_OUTPUT && CENTRED)

// The numbers of arrays in a layout.
enum { DY, SOURCE, DX, DS };

struct Arrays {
    const DATA_T* dy;
    const DATA_T* source;  // x, or y if FROM_OUTPUT
    const PARAM_T* scale;  // may be null: 1
    const PARAM_T* bias;   // may be null: 0; used if HAS_BIAS
    const STAT_T* mean;    // used if CENTRED and not FROM_OUTPUT
    const STAT_T* inv_std;
    const DATA_T* ds;      // used if ADDED
    const Layout& layout;
};

// What STRIDED kernels are given beside, and what stands for it in the others.
#if STRIDED
#define FURTHER_PARAMETERS , const __grid_constant__ Layout layout, const DATA_T* ds
#define FURTHER_VARIABLES
#else
#define FURTHER_PARAMETERS
#define FURTHER_VARIABLES const Layout layout = {}; const DATA_T* ds = nullptr;
#endif

// How many rows of partial sums lie in front of those of a plane and of the block's sample.
__device__ __forceinline__ i64 partials_before(int plane, i64 count) {
    return STRIDED ? (static_cast<i64>(plane) * gridDim.z + sample()) * count : plane * count;
}

// A row's statistics as memory has them, and widened. Absent ones are 0.
struct RawStatistics { STAT_T mean, inv_std; };
struct Statistics { A mean, inv_std; };

__device__ __forceinline__ RawStatistics fetch_statistics(const Arrays& in, bool wanted, i64 row) {
    RawStatistics of = {};
    if (CENTRED && !FROM_OUTPUT && wanted) of.mean = in.mean[row];
    if (wanted) of.inv_std = in.inv_std[row];
    return of;
}

__device__ __forceinline__ Statistics widen(const RawStatistics& of) {
    return {widen(of.mean), widen(of.inv_std)};
}

__device__ __forceinline__ Statistics statistics_of(const Arrays& in, i64 row) {
    return widen(fetch_statistics(in, true, row));
}

__device__ __forceinline__ A normalized(A source, A scale, A bias, const Statistics& of) {
    if (FROM_OUTPUT) return (HAS_BIAS ? source - bias : source) / scale;
    return (CENTRED ? source - of.mean : source) * of.inv_std;
}

// A pack of a row, and of its columns' parameters.
struct Part { Raw<DATA_T, VEC> dy, source; };
struct Parameters { Raw<PARAM_T, VEC> scale, bias; };

// What the formulas need of an element.
struct Element { A dy, xhat, w; };

__device__ __forceinline__ Element element_of(
    const Layout& layout, const Part& at, const Parameters& own, const Statistics& of, int k
) {
    const A dy = widen(at.dy.at(k)), scale = shifted(layout, widen(own.scale.at(k)));
    return {dy, normalized(widen(at.source.at(k)), scale, widen(own.bias.at(k)), of), dy * scale};
}

// Adds to a row's sums of w and of w * xhat.
__device__ __forceinline__ void add_to_row(const Element& e, Pair<A>& sums) {
    sums.first += e.w;
    sums.second = fused(e.w, e.xhat, sums.second);
}

// Adds to a column's sums: dscale and, unless it is an RMS norm, dbias.
__device__ __forceinline__ void add_to_column(const Element& e, A& dscale, A& dbias) {
    dscale = fused(e.dy, e.xhat, dscale);
    if (CENTRED) dbias += e.dy;
}

// dx from the row's means of w and of w * xhat, and ds, if ADDED.
__device__ __forceinline__ A gradient(const Element& e, const Pair<A>& means, A inv_std, A ds) {
    const A rest = CENTRED ? fused(e.xhat, means.second, means.first) : e.xhat * means.second;
    return ADDED ? fused(inv_std, e.w - rest, ds) : inv_std * (e.w - rest);
}
