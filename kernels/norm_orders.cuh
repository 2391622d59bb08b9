// The arithmetic of p-norms: one struct for each kind of p.
//
// `include` adds the elements of a chunk, `combine` joins two partial results, and `norm` gives
// the norm of a result. Sums carry the rounding errors of their additions along (two-sum), so
// their error stays below two units in the last place for any number of elements. No
// intermediate overflows or underflows. NaN stays NaN.

#pragma once

#include "dtypes.cuh"

#define LARGEST 0x1.fffffffffffffp1023

// Represents (hi + lo) * scale^p. A scale of 0 means that all elements so far were zero.
struct Part { double hi, lo, scale; };

// Adds x to hi + lo. The only error is the rounding of lo (Knuth's two-sum). The intrinsics
// prevent contraction into multiply-adds: two-sum needs every operation to round.
__device__ __forceinline__ void add(Part& part, double x) {
    const double sum = __dadd_rn(part.hi, x);
    const double back = __dsub_rn(sum, part.hi);
    const double lost = __dadd_rn(__dsub_rn(part.hi, __dsub_rn(sum, back)), __dsub_rn(x, back));
    part.lo = __dadd_rn(part.lo, lost);
    part.hi = sum;
}

// The sum that a Part holds. Once hi is infinite or NaN, lo is NaN and is ignored.
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

// p = 2. Squares of f32 and narrower are exact in double. An f64 is scaled by a power of two if
// its square could overflow or underflow (the idea of Blue's algorithm).
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

// Any other finite p: powers of magnitudes divided by the largest so far.
struct SumOfPowers {
    static constexpr int BYTES = 1, BATCH = 1;  // pow dominates the time and the code size
    template <typename T, int N>
    __device__ static __forceinline__ void include(Part& part, const Pack<T, N>& values, double p) {
        for (int i = 0; i < N; ++i) include_one(part, fabs(to_double(values.at[i])), p);
    }
    __device__ static __forceinline__ void include_one(Part& part, double x, double p) {
        if (x == 0) return;
        const double scale = x > LARGEST ? LARGEST : x;  // infinity divided by this is infinity
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

// p = infinity: the largest magnitude, or NaN if there is one.
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
