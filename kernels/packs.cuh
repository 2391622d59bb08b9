// Reads and writes of adjacent elements, in as few memory instructions as possible.

#pragma once

#include "dtypes.cuh"

// Packs of an array whose loads are in flight at once, in loops over packs.
constexpr int AT_ONCE = 4;

// Registers that a value takes.
template <typename T> constexpr int words() { return (sizeof(T) + 3) / 4; }

// The number of elements, of N, that one instruction moves: at most 16 bytes.
template <typename T, int N> constexpr int piece() { return N * sizeof(T) <= 16 ? N : 16 / sizeof(T); }

// A register's share of a pack of T: an element, or two of 16 bits.
template <typename T, bool PAIRS> struct Word {
    typedef T type;
    __device__ static __forceinline__ T both(T x) { return x; }
    __device__ static __forceinline__ T half(T word, int) { return word; }
    __device__ static __forceinline__ void put(T& word, int, T x) { word = x; }
    __device__ static __forceinline__ T across(T first, T, int) { return first; }
};
template <typename T> struct Word<T, true> {
    typedef u32 type;
    __device__ static __forceinline__ u32 both(T x) { return x.bits * 0x10001u; }
    __device__ static __forceinline__ T half(u32 word, int k) {
        return T{static_cast<unsigned short>(word >> (16 * k))};
    }
    __device__ static __forceinline__ void put(u32& word, int k, T x) {
        word = (word & ~(0xffffu << (16 * k))) | static_cast<u32>(x.bits) << (16 * k);
    }
    // The word that begins with the k-th half of the first of two words.
    __device__ static __forceinline__ u32 across(u32 first, u32 second, int k) {
        return __funnelshift_r(first, second, 16 * k);
    }
};

// N elements as memory has them. Until they are used, the loads are in flight.
template <typename T, int N> struct Raw {
    static const int PER_WORD = sizeof(T) == 2 && N > 1 ? 2 : 1;
    static const int WORDS = N / PER_WORD;
    typedef Word<T, PER_WORD == 2> Of;
    typename Of::type word[WORDS];
    __device__ __forceinline__ T at(int k) const { return Of::half(word[k / PER_WORD], k % PER_WORD); }
    __device__ __forceinline__ void put(int k, T x) { Of::put(word[k / PER_WORD], k % PER_WORD, x); }
};

// Reads N elements, up to P of them by one instruction. `from` must be aligned to the smaller of
// P * sizeof(T) and 16.
template <int N, int P = N, typename T> __device__ __forceinline__ Raw<T, N> fetch(const T* from) {
    typedef Raw<T, N> Read;
    Read raw = {};
    if constexpr (P < Read::PER_WORD) {
#pragma unroll
        for (int k = 0; k < N; ++k) raw.put(k, from[k]);
    } else {
        constexpr int EACH = piece<T, P>() / Read::PER_WORD;
        typedef Pack<typename Read::Of::type, EACH> Part;
#pragma unroll
        for (int i = 0; i < Read::WORDS; i += EACH) {
            const Part part = reinterpret_cast<const Part*>(from)[i / EACH];
#pragma unroll
            for (int k = 0; k < EACH; ++k) raw.word[i + k] = part.at[k];
        }
    }
    return raw;
}

// The same; if not `wanted`, it reads nothing and gives `absent`. One predicated instruction for
// each access: loads that follow do not wait for it.
template <int N, int P = N, typename T>
__device__ __forceinline__ Raw<T, N> fetch_if(bool wanted, const T* from, T absent) {
    Raw<T, N> raw;
#pragma unroll
    for (int i = 0; i < Raw<T, N>::WORDS; ++i) raw.word[i] = Raw<T, N>::Of::both(absent);
    if (wanted) raw = fetch<N, P>(from);
    return raw;
}

template <int N, typename T, typename A>
__device__ __forceinline__ void widen(const Raw<T, N>& raw, A (&to)[N]) {
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = widen(raw.at(k));
}

// Reads N elements and widens them.
template <int N, typename T, typename A>
__device__ __forceinline__ void load(const T* from, A (&to)[N]) {
    widen(fetch<N>(from), to);
}

// N elements, each rounded once.
template <typename T, int N, typename A> __device__ __forceinline__ Raw<T, N> narrow_all(const A (&from)[N]) {
    Raw<T, N> raw;
#pragma unroll
    for (int i = 0; i < Raw<T, N>::WORDS; ++i) {
        if constexpr (Raw<T, N>::PER_WORD == 2) raw.word[i] = narrow_two<T>(from[2 * i], from[2 * i + 1]);
        else raw.word[i] = narrow<T>(from[i]);
    }
    return raw;
}

// Writes N elements. `to` must be aligned as for `fetch`.
template <int N, int P = N, typename T> __device__ __forceinline__ void store(T* to, const Raw<T, N>& raw) {
    typedef Raw<T, N> Written;
    if constexpr (P < Written::PER_WORD) {
#pragma unroll
        for (int k = 0; k < N; ++k) to[k] = raw.at(k);
    } else {
        constexpr int EACH = piece<T, P>() / Written::PER_WORD;
        typedef Pack<typename Written::Of::type, EACH> Part;
#pragma unroll
        for (int i = 0; i < Written::WORDS; i += EACH) {
            Part part;
#pragma unroll
            for (int k = 0; k < EACH; ++k) part.at[k] = raw.word[i + k];
            reinterpret_cast<Part*>(to)[i / EACH] = part;
        }
    }
}

// The same, each rounded once.
template <int N, int P = N, typename T, typename A>
__device__ __forceinline__ void store(T* to, const A (&from)[N]) {
    store<N, P>(to, narrow_all<T>(from));
}

template <int N, typename A>
__device__ __forceinline__ void fill(A (&to)[N], A value) {
#pragma unroll
    for (int k = 0; k < N; ++k) to[k] = value;
}

// Reads N elements, or uses `absent` for each if `from` is null.
template <int N, typename T, typename A>
__device__ __forceinline__ void load_or(const T* from, i64 at, A absent, A (&to)[N]) {
    widen(fetch_if<N>(from, from + at, narrow<T>(absent)), to);
}
