// How magnitudes add up to a p-norm: one struct for each p that has an arithmetic of its own.
//
// Each takes in the elements of a chunk (`include`), joins two partial results (`combine`) and
// says what norm a result stands for (`norm`). Sums carry the rounding errors of their
// additions along (two-sum), so that their own error stays below two units in the last place
// however many elements there are; no power over- or underflows; NaN is kept.

#pragma once

#include "dtypes.cuh"

#define LARGEST 0x1.fffffffffffffp1023

// Stands for (hi + lo) * scale^p. A scale of 0: nothing but zeros so far.
struct Part { double hi, lo, scale; };

// hi + lo grows by x with no error but in lo's own last places (Knuth's two-sum). Never
// contracted into a multiply-add: it works because each operation rounds.
__device__ __forceinline__ void add(Part& part, double x) {
    const double sum = __dadd_rn(part.hi, x);
    const double back = __dsub_rn(sum, part.hi);
    const double lost = __dadd_rn(__dsub_rn(part.hi, __dsub_rn(sum, back)), __dsub_rn(x, back));
    part.lo = __dadd_rn(part.lo, lost);
    part.hi = sum;
}

// What a Part has summed up. Once hi is infinite or NaN, lo is NaN and means nothing.
__device__ __forceinline__ double total(const Part& part) {
    return fabs(part.hi) <= LARGEST ? part.hi + part.lo : part.hi;
}

// Two Parts joined on the larger scale.
template <typename Order>
__device__ __forceinline__ void combine_scaled(Part& into, Part other, double p) {
    if (other.scale > into.scale) {
        const Part smaller = into;
        into = other;
        other = smaller;
    }
    if (other.scale < into.scale) Order::shrink(other, other.scale / into.scale, p);
    add(into, other.hi);
    into.lo = __dadd_rn(into.lo, other.lo);
}

// Adds Order::term of N elements, each exact in double: a tree, whose depth bounds the rounding.
template <typename Order, typename T, int N>
__device__ __forceinline__ void add_terms(Part& part, const Pack<T, N>& values) {
    double terms[N];
#pragma unroll
    for (int i = 0; i < N; ++i) terms[i] = Order::term(values.at[i]);
#pragma unroll
    for (int width = N / 2; width > 0; width /= 2)
#pragma unroll
        for (int i = 0; i < width; ++i) terms[i] += terms[i + width];
    add(part, terms[0]);
}

// p = 1. A double holds every sum of magnitudes whose norm it holds.
struct Sum {
    static constexpr int BYTES = 16, BATCH = 4;
    template <typename T> __device__ static __forceinline__ double term(T x) {
        return fabs(to_double(x));
    }
    template <typename T, int N>
    __device__ static __forceinline__ void include(Part& part, const Pack<T, N>& values, double) {
        add_terms<Sum>(part, values);
    }
    __device__ static __forceinline__ void combine(Part& into, const Part& other, double) {
        add(into, other.hi);
        into.lo = __dadd_rn(into.lo, other.lo);
    }
    __device__ static __forceinline__ double norm(const Part& part, double) { return total(part); }
};

// p = 2. Squares of f32 and narrower are exact in double; f64 is scaled by a power of two
// where a square could leave its range (the idea of Blue's algorithm).
struct SumOfSquares {
    static constexpr int BYTES = 16, BATCH = 4;
    template <typename T> __device__ static __forceinline__ double term(T x) {
        return to_double(x) * to_double(x);
    }
    template <typename T, int N>
    __device__ static __forceinline__ void include(Part& part, const Pack<T, N>& values, double) {
        add_terms<SumOfSquares>(part, values);
        part.scale = 1;
    }
    template <int N>
    __device__ static __forceinline__ void include(Part& part, const Pack<f64, N>& values, double p) {
#pragma unroll
        for (int i = 0; i < N; ++i) include_double(part, fabs(values.at[i]), p);
    }
    __device__ static __forceinline__ void include_double(Part& part, double x, double p) {
        const double scale = x > 0x1p480 ? 0x1p600 : x < 0x1p-480 ? 0x1p-600 : 1;  // NaN: 1
        if (scale > part.scale) {
            shrink(part, part.scale / scale, p);
            part.scale = scale;
        }
        const double y = part.scale == 1 ? x : x * (part.scale > 1 ? 0x1p-600 : 0x1p600);
        add(part, __dmul_rn(y, y));
    }
    // In two steps: the square of the ratio alone would underflow.
    __device__ static __forceinline__ void shrink(Part& part, double ratio, double) {
        part.hi = part.hi * ratio * ratio;
        part.lo = part.lo * ratio * ratio;
    }
    __device__ static __forceinline__ void combine(Part& into, const Part& other, double p) {
        combine_scaled<SumOfSquares>(into, other, p);
    }
    __device__ static __forceinline__ double norm(const Part& part, double) {
        return part.scale * sqrt(total(part));
    }
};

// Any other finite p: powers of what is divided by the largest magnitude so far.
struct SumOfPowers {
    static constexpr int BYTES = 1, BATCH = 1;  // pow is what takes the time, and code
    template <typename T, int N>
    __device__ static __forceinline__ void include(Part& part, const Pack<T, N>& values, double p) {
        for (int i = 0; i < N; ++i) include_one(part, fabs(to_double(values.at[i])), p);
    }
    __device__ static __forceinline__ void include_one(Part& part, double x, double p) {
        if (x == 0) return;
        const double scale = x > LARGEST ? LARGEST : x;  // infinity over this is infinity
        if (scale > part.scale) {
            shrink(part, part.scale / scale, p);
            part.scale = scale;
        }
        add(part, pow(x / part.scale, p));
    }
    __device__ static __forceinline__ void shrink(Part& part, double ratio, double p) {
        const double factor = pow(ratio, p);
        part.hi *= factor;
        part.lo *= factor;
    }
    __device__ static __forceinline__ void combine(Part& into, const Part& other, double p) {
        combine_scaled<SumOfPowers>(into, other, p);
    }
    __device__ static __forceinline__ double norm(const Part& part, double p) {
        return part.scale * pow(total(part), 1 / p);
    }
};

// p = infinity: the largest magnitude, or NaN where there is one.
struct Largest {
    static constexpr int BYTES = 16, BATCH = 4;
    __device__ static __forceinline__ void join(Part& part, double x) {
        if (x > part.hi || x != x) part.hi = x;
    }
    template <typename T, int N>
    __device__ static __forceinline__ void include(Part& part, const Pack<T, N>& values, double) {
#pragma unroll
        for (int i = 0; i < N; ++i) join(part, fabs(to_double(values.at[i])));
    }
    __device__ static __forceinline__ void combine(Part& into, const Part& other, double) {
        join(into, other.hi);
    }
    __device__ static __forceinline__ double norm(const Part& part, double) { return part.hi; }
};
