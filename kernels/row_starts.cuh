// The addresses of the rows of a norm's arrays, accesses to packs of them, and a scale's offset.
//
// STRIDED = 0 (default): rows are contiguous, and begin at an address that is aligned for packs.
// STRIDED = 1: each array has its own strides between rows, which may begin at any multiple of PIECE
// elements; an access then moves so many. Threads have the same elements and add in the same order
// in both cases, so the bits are those of contiguous rows.
//
// FURTHER = 1, as of all STRIDED kernels: what plain calls do without. A scale has an offset. There are
// gridDim.z samples, each with `rows` rows and with a scale and a bias of its own, which lie one behind
// another; rows are counted through all samples. ADDED = 1: and one more array, the residual or ds.

#pragma once

#include "packs.cuh"

#ifndef STRIDED
#define STRIDED 0
#endif
#ifndef FURTHER
#define FURTHER STRIDED
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
#elif FURTHER
struct Layout { double scale_offset; };
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

// The start of a row, in elements from the array's first.
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
__device__ __forceinline__ i64 sample() { return FURTHER ? blockIdx.z : 0; }

// The same parameter of the block's sample, or null.
template <typename T> __device__ __forceinline__ const T* of_sample(const T* parameter, i64 width) {
    return FURTHER && parameter ? parameter + sample() * width : parameter;
}

#if FURTHER
// What is added to scales. In plain sight, compilers would keep all sums with it for all rows, in registers that
// rows need.
template <typename A> __device__ __forceinline__ A offset_of(const Layout& layout) {
    A offset = narrow<A>(layout.scale_offset);
#if !STRIDED && !defined(GRADKIT_EMULATED)
    if constexpr (sizeof(A) == 4) asm volatile("" : "+f"(offset.value));
#endif
    return offset;
}
#endif

// A scale with its offset.
template <typename A> __device__ __forceinline__ A shifted(const Layout& layout, A scale) {
#if FURTHER
    return scale + offset_of<A>(layout);
#else
    return scale;
#endif
}
__device__ __forceinline__ Real<Two> shifted(const Layout& layout, Real<Two> scale) {
#if FURTHER
    const float offset = offset_of<Real<float>>(layout).value;
    return scale + Real<Two>{{offset, offset}};
#else
    return scale;
#endif
}
