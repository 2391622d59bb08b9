// x * factor, as if multiplied in double and rounded once, almost always without double precision,
// for which many GPUs have few units.
//
// Two floats enclose the exact product. If both round to the same number of x's dtype, that is the
// result. Otherwise the product is close to halfway between two numbers, and is computed in double.

#pragma once

#include "packs.cuh"

// A factor, and its parts as floats.
struct Factor {
    double exact;
    float head, tail;  // of 13 bits and 24: x * head is exact for x of 16 bits
    float near, rest;  // of 24 bits each
    bool fits;         // whether the floats are good for anything
    u32 least;         // the bits of the smallest magnitude of x that they are for
    __device__ explicit Factor(double factor) : exact(factor) {
        near = rounded(factor);
        rest = rounded(factor - exactly(near));
        u32 bits = __float_as_uint(near) & 0xfffff800u;
        if (fabs(exactly(__uint_as_float(bits))) > fabs(factor)) bits -= 0x800u;
        head = __uint_as_float(bits);
        tail = rounded(factor - exactly(head));
        // With the sign of head and never 0, so that x * head + x * tail is right for 0 and infinity.
        if (tail == 0) tail = product_of(head, 0x1p-40f);
        // Products from 2^-99 on: what rounding takes from them is no subnormal either.
        fits = fabs(factor) >= 0x1p-70 && fabs(factor) <= 0x1p100;
        least = max(1u, __float_as_uint(rounded(0x1p-99 / fabs(factor))));
    }
};

// The bits of a magnitude less 1, so that a zero counts as large: its product is exact.
__device__ __forceinline__ u32 less_one(Real<f32> x) { return (__float_as_uint(x.value) & 0x7fffffffu) - 1; }

// Floats on both sides of x * factor. The error of a product in one float is less than 2^-23 of
// it. In two floats it is less than 2^-45, so less than 2^-20 of `excess` if that decides a rounding.
template <typename T>
__device__ __forceinline__ void enclose(Real<f32> x, const Factor& by, Real<f32>& one, Real<f32>& other) {
    if constexpr (sizeof(T) == 2) {
        const Real<f32> product = fused(x, {by.tail}, x * Real<f32>{by.head});
        one = product * Real<f32>{1 - 0x1p-23f};
        other = product * Real<f32>{1 + 0x1p-23f};
    } else {
        const Real<f32> product = x * Real<f32>{by.near}, minus = {negative_of(x.value)};
        // The excess rather than the loss of the product: so -0 stays -0.
        const Real<f32> excess = fused(minus, {by.rest}, fused(minus, {by.near}, product));
        one = fused(excess, {-1 + 0x1p-20f}, product);
        other = fused(excess, {-1 - 0x1p-20f}, product);
    }
}

__device__ __forceinline__ bool agree(u32 one, u32 other) { return one == other; }
__device__ __forceinline__ bool agree(f32 one, f32 other) { return one == other; }  // a NaN never
__device__ __forceinline__ bool agree(f16 one, f16 other) { return one.bits == other.bits; }
__device__ __forceinline__ bool agree(bf16 one, bf16 other) { return one.bits == other.bits; }

// N products, or false if one of them needs double.
template <typename T, int N>
__device__ __forceinline__ bool multiply_in_single(const Raw<T, N>& x, const Factor& by, Raw<T, N>& result) {
    Real<f32> one[N], other[N];
    u32 smallest = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const Real<f32> value = widen(x.at(i));
        smallest = min(smallest, less_one(value));
        enclose<T>(value, by, one[i], other[i]);
    }
    result = narrow_all<T>(one);
    const Raw<T, N> same = narrow_all<T>(other);
    bool decided = by.fits && smallest >= by.least - 1;
#pragma unroll
    for (int w = 0; w < Raw<T, N>::WORDS; ++w) decided = decided && agree(result.word[w], same.word[w]);
    return decided;
}

template <typename T> __device__ __forceinline__ T multiply_in_double(T x, const Factor& by) {
    return narrow<T>(to_double(x) * by.exact);
}

// The same for any dtype; for f64 always true.
template <typename T, int N>
__device__ __forceinline__ bool multiply(const Raw<T, N>& x, const Factor& by, Raw<T, N>& result) {
    if constexpr (sizeof(T) < 8) return multiply_in_single(x, by, result);
#pragma unroll
    for (int i = 0; i < N; ++i) result.put(i, multiply_in_double(x.at(i), by));
    return true;
}
