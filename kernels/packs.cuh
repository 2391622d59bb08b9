// Reading and writing runs of adjacent elements in as few memory instructions as they allow.

#pragma once

#include "dtypes.cuh"

// How many of N elements one instruction moves: 16 bytes at most.
template <typename T, int N> struct Piece {
    static const int size = N * sizeof(T) <= 16 ? N : 16 / sizeof(T);
};

// Reads N elements, widened. `from` must be a multiple of the smaller of N * sizeof(T) and 16.
template <int N, typename T, typename A>
__device__ __forceinline__ void load(const T* from, A (&to)[N]) {
    typedef Pack<T, Piece<T, N>::size> Part;
#pragma unroll
    for (int i = 0; i < N; i += Piece<T, N>::size) {
        const Part part = *reinterpret_cast<const Part*>(from + i);
#pragma unroll
        for (int k = 0; k < Piece<T, N>::size; ++k) to[i + k] = widen(part.at[k]);
    }
}

// Writes N elements, each rounded once. The same alignment.
template <int N, typename T, typename A>
__device__ __forceinline__ void store(T* to, const A (&from)[N]) {
    typedef Pack<T, Piece<T, N>::size> Part;
#pragma unroll
    for (int i = 0; i < N; i += Piece<T, N>::size) {
        Part part;
#pragma unroll
        for (int k = 0; k < Piece<T, N>::size; ++k) part.at[k] = narrow<T>(from[i + k]);
        *reinterpret_cast<Part*>(to + i) = part;
    }
}

template <int N, typename A>
__device__ __forceinline__ void fill(A (&to)[N], A value) {
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = value;
}

// Reads N elements, or takes `absent` for each where there is no array.
template <int N, typename T, typename A>
__device__ __forceinline__ void load_or(const T* from, i64 at, A absent, A (&to)[N]) {
    if (from) load<N>(from + at, to);
    else fill<N>(to, absent);
}

// A product that the compiler may not melt into a following addition: where it appears twice,
// it is the same number twice.
__device__ __forceinline__ float product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double product(double a, double b) { return __dmul_rn(a, b); }
