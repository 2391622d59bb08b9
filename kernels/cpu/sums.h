// Vectors, and sums over a row in an order that is the same for each instruction set.

#pragma once

#include "floats.h"

// Bytes of a register.
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

namespace ISA {

// A sum has so many totals, whatever a vector holds.
template <typename A> constexpr int LANES = 128 / sizeof(A);
// Elements that one set of totals holds before float64 takes over.
template <typename A> constexpr i64 RUN = 8 * LANES<A>;
// And in float64, before the lanes are added up.
template <typename A> constexpr i64 CHUNK = 4 * RUN<A>;
constexpr int MOST_CHUNKS = 64;  // so at most 32,768 columns are summed at a time

template <typename A> struct VectorOf {
    typedef A type __attribute__((vector_size(VECTOR_BYTES)));
    static constexpr int length = VECTOR_BYTES / sizeof(A);
};

// As many numbers of A as V has.
template <typename V, typename A> struct PartOf;
template <typename A> struct PartOf<float, A> { typedef A type; };
template <typename A> struct PartOf<double, A> { typedef A type; };
template <typename A> struct PartOf<VectorOf<float>::type, A> {
    typedef A type __attribute__((vector_size(VECTOR_BYTES / sizeof(float) * sizeof(A))));
};
template <typename A> struct PartOf<VectorOf<double>::type, A> {
    typedef A type __attribute__((vector_size(VECTOR_BYTES / sizeof(double) * sizeof(A))));
};

template <typename V> struct PlainOf {
    typedef V type;
};
template <typename V> struct PlainOf<V&> {
    typedef V type;
};
template <typename V> using Plain = typename PlainOf<V>::type;

// A number, or a vector of them, from where it lies.
template <typename V, typename A> INLINE V read(const Element<A>* from) {
    typename PartOf<V, A>::type found;
    __builtin_memcpy(&found, from, sizeof found);
    if constexpr (sizeof(V) <= sizeof(double) || sizeof found == sizeof(V))
        return static_cast<V>(found);
    // One instruction from GCC, which makes several of __builtin_convertvector.
    else if constexpr (sizeof(V) == 16)
        return V{found[0], found[1]};
    else if constexpr (sizeof(V) == 32)
        return V{found[0], found[1], found[2], found[3]};
    else
        return V{
            found[0], found[1], found[2], found[3], found[4], found[5], found[6], found[7],
        };
}

template <typename V, typename A> INLINE void write(V value, Element<A>* to) {
    static_assert(sizeof(V) % sizeof(A) == 0, "of one type");
    __builtin_memcpy(to, &value, sizeof value);
}

struct Sums {
    double first, second;
};

template <int COUNT> INLINE double sum_of(double (&lanes)[COUNT]) {
#pragma GCC unroll 5
    for (int half = COUNT / 2; half > 0; half /= 2)
#pragma GCC unroll 16
        for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    return lanes[0];
}

// Equal terms double without an error; one running total of them drifts by a unit for every four.
INLINE double by_halves(double* values, int count) {
    while (count > 1) {
        const int half = count / 2;
        for (int k = 0; k < half; ++k) values[k] += values[count - half + k];
        count -= half;
    }
    return values[0];
}

// Two sums over columns: add(column, first, second) adds the terms of a column, or of as many as a
// vector has, to two totals.
template <typename A, typename F> INLINE Sums sums_over(i64 width, F add) {
    typedef typename VectorOf<A>::type V;
    constexpr int length = VectorOf<A>::length, vectors = LANES<A> / length;
    double first[MOST_CHUNKS], second[MOST_CHUNKS];
    int chunks = 0;
    i64 at = 0;
    do {
        const i64 end = at + CHUNK<A> < width ? at + CHUNK<A> : width;
        double lanes[2][LANES<A>] = {};
        while (at < end) {
            const i64 stop = at + RUN<A> < end ? at + RUN<A> : end;
            V run[2][vectors] = {};
            for (; at + LANES<A> <= stop; at += LANES<A>)
#pragma GCC unroll 8
                for (int v = 0; v < vectors; ++v) add(at + v * length, run[0][v], run[1][v]);
            A totals[2][LANES<A>];
            __builtin_memcpy(totals, run, sizeof totals);
            for (int l = 0; l < static_cast<int>(stop - at); ++l)
                add(at + l, totals[0][l], totals[1][l]);
            at = stop;
            for (int l = 0; l < LANES<A>; ++l) lanes[0][l] += static_cast<double>(totals[0][l]);
            for (int l = 0; l < LANES<A>; ++l) lanes[1][l] += static_cast<double>(totals[1][l]);
        }
        first[chunks] = sum_of(lanes[0]);
        second[chunks] = sum_of(lanes[1]);
        ++chunks;
    } while (at < width);
    return {by_halves(first, chunks), by_halves(second, chunks)};
}

}  // namespace ISA
