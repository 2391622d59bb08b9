// Shared by the gradients of layer norm and RMS norm, from their input or output.
//
// Macros: DATA_T, STAT_T, PARAM_T; VEC, the number of elements per access; FROM_OUTPUT (1: xhat is
// computed from the norm's output); CENTRED (0: RMS norm, without a mean); STRIDED, FURTHER, ADDED (1: ds,
// the gradient from the residual branch, is added to dx): row_starts.cuh.

#pragma once

#include "abreast.cuh"
#include "row_starts.cuh"
#include "rows.cuh"

// dscale and, unless it is an RMS norm, dbias.
#define PLANES (CENTRED ? 2 : 1)

// True if a bias is subtracted from the norm's output.
#define HAS_BIAS (FROM_OUTPUT && CENTRED)

// dx may be null, if it is not wanted, unless ADDED. Rows of whole packs are then left before their own sums are
// joined. Others would wait for memory once more if they could be: they only leave out what they write.
constexpr bool LEFT_EARLY = VEC * sizeof(DATA_T) == 16 && !ADDED;

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

// Further parameters of FURTHER kernels, and variables in their place in the others.
#if FURTHER
#define FURTHER_PARAMETERS , const __grid_constant__ Layout layout, const DATA_T* ds
#define FURTHER_VARIABLES
#else
#define FURTHER_PARAMETERS
#define FURTHER_VARIABLES const Layout layout = {}; const DATA_T* ds = nullptr;
#endif

// The number of rows of partial sums in front of those of a plane and of the block's sample.
__device__ __forceinline__ i64 partials_before(int plane, i64 count) {
    return FURTHER ? (static_cast<i64>(plane) * gridDim.z + sample()) * count : plane * count;
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

// xhat from the norm's input or output. `inverse`: of scale, by which y is multiplied, if the thread has it for all its
// rows: a quotient takes as long as ten products. So each way to hold a row has the same bits, within two units in the
// last place for scales up to 2^126.
template <bool INVERSES>
__device__ __forceinline__ Numbers normalized(
    Numbers source, Numbers scale, Numbers bias, const Statistics& of, Numbers inverse
) {
    if (FROM_OUTPUT) return (HAS_BIAS ? source - bias : source) * (INVERSES ? inverse : each(A{1}) / scale);
    return (CENTRED ? source - each(of.mean) : source) * each(of.inv_std);
}

// A pack of a row, and of its columns' parameters.
struct Part { Raw<DATA_T, VEC> dy, source; };
struct Parameters { Raw<PARAM_T, VEC> scale, bias; };

// Terms of the formulas for ABREAST elements.
struct Elements { Numbers dy, xhat, w; };

// The terms of the elements from the k-th on.
template <bool INVERSES = false>
__device__ __forceinline__ Elements elements_at(
    const Layout& layout, const Part& at, const Parameters& own, const Statistics& of, int k, Numbers inverse = {}
) {
    const Numbers dy = numbers_at(at.dy, k), scale = shifted(layout, numbers_at(own.scale, k));
    const Numbers source = numbers_at(at.source, k), bias = numbers_at(own.bias, k);
    return {dy, normalized<INVERSES>(source, scale, bias, of, inverse), dy * scale};
}

// 1 / scale of a pack's columns, which a thread computes once for all its rows.
__device__ __forceinline__ void invert(const Layout& layout, const Raw<PARAM_T, VEC>& scale, A (&inverse)[VEC]) {
    widen(scale, inverse);
#pragma unroll
    for (int k = 0; k < VEC; ++k) inverse[k] = A{1} / shifted(layout, inverse[k]);
}

// Adds to a row's sums of w and of w * xhat, one element after the other: those of the first `count`.
__device__ __forceinline__ void add_to_row(const Elements& e, Pair<A>& sums, int count = ABREAST) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
        const A w = Abreast::part(e.w, i);
        sums.first += w;
        sums.second = fused(w, Abreast::part(e.xhat, i), sums.second);
    }
}

// Adds to the columns' sums of the first `count`: sum(0, i) is that of dscale, and sum(1, i) that of dbias,
// unless it is an RMS norm.
template <typename Sum>
__device__ __forceinline__ void add_to_columns(const Elements& e, Sum sum, int count = ABREAST) {
    const auto sums = [&](int plane) { return Abreast::join(sum(plane, 0), count > 1 ? sum(plane, 1) : A{0}); };
    const auto put = [&](int plane, Numbers x) {
#pragma unroll
        for (int i = 0; i < count; ++i) sum(plane, i) = Abreast::part(x, i);
    };
    put(0, fused(e.dy, e.xhat, sums(0)));
    if (CENTRED) put(1, sums(1) + e.dy);
}

// dx from the row's means of w and of w * xhat, and ds, if ADDED.
__device__ __forceinline__ Numbers gradient(const Elements& e, const Pair<A>& means, A inv_std, Numbers ds) {
    const Numbers first = each(means.first), second = each(means.second);
    const Numbers rest = CENTRED ? fused(e.xhat, second, first) : e.xhat * second;
    return ADDED ? fused(each(inv_std), e.w - rest, ds) : each(inv_std) * (e.w - rest);
}
