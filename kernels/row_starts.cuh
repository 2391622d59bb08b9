// The addresses of the rows of a norm's arrays, accesses to packs of them, and a scale's offset.
//
// STRIDED = 0 (default): rows are contiguous, and begin at an address that is aligned for packs.
// STRIDED = 1: each array has its own strides between rows, which may begin at any multiple of PIECE
// elements; an access then moves so many. Threads have the same elements and add in the same order
// in both cases, so the bits are those of contiguous rows. ADDED = 1 (only if STRIDED): there is one
// more array, the residual or ds.
//
// Samples (only if STRIDED): gridDim.z of them, each with `rows` rows and with a scale and a bias of
// its own, which lie one behind another. Rows are counted through all samples.

#pragma once

#include "packs.cuh"

#ifndef STRIDED
#define STRIDED 0
#endif
#ifndef ADDED
#define ADDED 0
#endif
#ifndef PIECE
#define PIECE VEC
#endif

// A row's number, in C order of up to three dimensions, or as it is if there are no strides.
struct Place { i64 outer, middle, inner; };

#if STRIDED
// `_cuda/row_starts.py` has the same layout.
struct Layout {
    i64 middle, inner;     // sizes of the inner two dimensions
    Place step[5];         // of each array, from a row to the next along each dimension, in elements
    double scale_offset;   // is added to scale; -0.0, which changes no number, for none
};
#else
struct Layout {};
#endif

// The quotient of numbers that are not negative: 64 bits take four times as long as 32.
__device__ __forceinline__ i64 quotient(i64 a, i64 b) {
    return (a | b) >> 32 ? a / b : static_cast<u32>(a) / static_cast<u32>(b);
}

__device__ __forceinline__ Place place_of(const Layout& layout, i64 row) {
#if STRIDED
    if (row < layout.inner) return {0, 0, row};  // always, if one stride leads from row to row
    const i64 others = quotient(row, layout.inner), outer = quotient(others, layout.middle);
    return {outer, others - outer * layout.middle, row - others * layout.inner};
#else
    return {0, 0, row};
#endif
}

// Where a row of an array begins, in elements from the array's first.
__device__ __forceinline__ i64 start_of(const Layout& layout, int array, const Place& at, i64 width) {
#if STRIDED
    const Place& step = layout.step[array];
    return at.outer * step.outer + at.middle * step.middle + at.inner * step.inner;
#else
    return at.inner * width;
#endif
}

// A pack of a row; zeros if it is not wanted.
template <typename T> __device__ __forceinline__ Raw<T, VEC> fetch_data(bool wanted, const T* from) {
    return fetch_if<VEC, PIECE>(wanted, from, T{});
}

template <typename T, typename V> __device__ __forceinline__ void store_data(T* to, const V& from) {
    store<VEC, PIECE>(to, from);
}

// The block's sample, whose parameters begin at `width` times this.
__device__ __forceinline__ i64 sample() { return STRIDED ? blockIdx.z : 0; }

// The same parameter of the block's sample, or null.
template <typename T> __device__ __forceinline__ const T* of_sample(const T* parameter, i64 width) {
    return STRIDED && parameter ? parameter + sample() * width : parameter;
}

// A scale with its offset.
template <typename A> __device__ __forceinline__ A shifted(const Layout& layout, A scale) {
#if STRIDED
    return scale + narrow<A>(layout.scale_offset);
#else
    return scale;
#endif
}
__device__ __forceinline__ Real<Two> shifted(const Layout& layout, Real<Two> scale) {
    const auto part = [&](float x) { return shifted(layout, Real<float>{x}).value; };
    return {{part(scale.value.first), part(scale.value.second)}};
}
