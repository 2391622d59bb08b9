// Reads and writes of adjacent elements, in as few memory instructions as possible.

#pragma once

#include "dtypes.cuh"

// The number of elements, of N, that one instruction moves: at most 16 bytes.
template <typename T, int N> struct Piece {
    static const int size = N * sizeof(T) <= 16 ? N : 16 / sizeof(T);
};

// Reads N elements and widens them. `from` must be aligned to the smaller of N * sizeof(T) and 16.
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

// Writes N elements, each rounded once. `to` must be aligned in the same way.
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

// Reads N elements, or uses `absent` for each if `from` is null.
template <int N, typename T, typename A>
__device__ __forceinline__ void load_or(const T* from, i64 at, A absent, A (&to)[N]) {
    if (from) load<N>(from + at, to);
    else fill<N>(to, absent);
}
