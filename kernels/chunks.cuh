// The columns of a row that a thread of layer_norm_grad has, and the accesses that reach them.
//
// ODD = 0 (default): CHUNKS packs. ODD = 1, for rows of 16 bits that are not whole packs: CHUNKS of the packs
// between the first and the last whole one and, if it is one of the first threads, one element of what
// is left, the border:
//
//   columns   0 ... VEC - 1          VEC ... packed - VEC - 1   packed - VEC ... width - 1
//   a thread  one, the first VEC do  CHUNKS packs               one, those behind do
//
// Such a row begins `lead` elements behind a boundary of packs in memory, so that each of its packs lies
// in two of memory: a thread reads both, whole, and moves its own out of them. Nothing is read that is not
// of the row. To write dx in packs of memory, threads exchange their packs in shared memory. Columns and the
// order of additions do not depend on `lead`, which may be another in each array if there are strides:
// then elements are read and written one by one (PIECE = 1).

#pragma once

#include "row_starts.cuh"

#ifndef ODD
#define ODD 0
#endif

constexpr bool ACROSS = ODD && !STRIDED;  // two packs of memory are read for one
constexpr int ALL_CHUNKS = CHUNKS + ODD;

__device__ __forceinline__ constexpr bool is_border(int chunk) { return ODD && chunk == CHUNKS; }

// True if a chunk has a k-th element.
__device__ __forceinline__ constexpr bool has(int chunk, int k) { return k == 0 || !is_border(chunk); }

// The columns in whole packs.
__device__ __forceinline__ int packed(int width) { return width & -VEC; }

// True if a chunk that begins at `column` exists.
__device__ __forceinline__ bool is_inside(int chunk, int column, int width) {
    return column < (ODD && !is_border(chunk) ? packed(width) - VEC : width);
}

// The elements between a boundary of packs and the start of a row, if rows have no gaps.
__device__ __forceinline__ u32 lead_of(i64 row, int width) {
    return static_cast<u32>(row) * static_cast<u32>(width) % VEC;
}

template <int P, typename T>
__device__ __forceinline__ Raw<T, VEC> fetch_chunk(int chunk, bool wanted, const T* from, T absent) {
    if (!is_border(chunk)) return fetch_if<VEC, P>(wanted, from, absent);
    Raw<T, VEC> raw = {};
    raw.put(0, wanted ? *from : absent);
    return raw;
}

// A chunk of a row; zeros if it is not wanted.
__device__ __forceinline__ Raw<DATA_T, VEC> fetch_chunk(int chunk, bool wanted, const DATA_T* from) {
    return fetch_chunk<PIECE>(chunk, wanted, from, DATA_T{});
}

// Its columns of a parameter; `absent` if they are not wanted. Those of a sample may begin anywhere.
template <typename A>
__device__ __forceinline__ Raw<PARAM_T, VEC> fetch_parameter(
    int chunk, bool wanted, const PARAM_T* from, A absent
) {
    return fetch_chunk<ODD && STRIDED ? 1 : VEC>(chunk, wanted, from, narrow<PARAM_T>(absent));
}

template <int P, typename T, typename A>
__device__ __forceinline__ void store_chunk(int chunk, T* to, const A (&from)[VEC]) {
    if (is_border(chunk)) *to = narrow<T>(from[0]);
    else store<VEC, P>(to, from);
}

// A number of words as a type.
template <int WORDS> struct Whole {};

// Calls `move` with the number of whole words in `lead` elements, MOST or fewer: there is code for each, so that a
// word takes one instruction to move. All threads of a row take the same.
template <int MOST, int WHOLE = 0, typename Move> __device__ __forceinline__ void by_words(u32 lead, Move move) {
    if (WHOLE == MOST || lead / Raw<DATA_T, VEC>::PER_WORD == WHOLE) move(Whole<WHOLE>{});
    else if constexpr (WHOLE < MOST) by_words<MOST, WHOLE + 1>(lead, move);
}

// The pack that begins `lead` elements behind the first of two: WHOLE words and less than one.
template <int WHOLE, typename T>
__device__ __forceinline__ Raw<T, VEC> across(
    Whole<WHOLE>, const Raw<T, VEC>& first, const Raw<T, VEC>& second, u32 lead
) {
    typedef Raw<T, VEC> Found;
    constexpr int WORDS = Found::WORDS;
    Found found;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
        const auto word = [&](int k) { return k < WORDS ? first.word[k] : second.word[k % WORDS]; };
        found.word[i] = Found::Of::across(word(WHOLE + i), word(WHOLE + i + 1), lead % Found::PER_WORD);
    }
    return found;
}
