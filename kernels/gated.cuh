// Shared by gated RMS norm and its gradient: an activated gate, and where rows lie.
//
// Macros: DATA_T, STAT_T, PARAM_T; VEC, the number of elements per access; BEFORE, whether the norm
// comes before the product with the gate. All rows are at strides (row_starts.cuh).
//
// A row is visited twice: for its mean, and for the outputs. A thread has up to CHUNKS packs of it, reads
// them once, activates each gate once, and keeps what the second visit needs in registers. With
// CHUNKS = 0 a row may have any length, and both visits read it.

#pragma once

#define STRIDED 1
#include "row_starts.cuh"
#include "rows.cuh"

typedef Wide<DATA_T>::type A;

// The least argument whose exponential is a normal number; what rounds to an integer, and its bits
// less the exponent's of 1; log 2 in two parts, of which multiples of the first are exact; a polynomial
// for e^r between the halves of log 2, off by less than half a unit; the steps of a reciprocal.
template <typename F> struct Exponential;
template <> struct Exponential<f32> {
    static constexpr f32 LEAST = -87, ROUND = 0x1.8p23f, HEAD = 0.693359375f, TAIL = -2.12194440e-4f;
    // The best ones of this degree that begin with 1 + r, for relative errors: 4.4e-9.
    static constexpr f32 TERMS[] = {
        1, 1, 0x1.fffffcp-2f, 0x1.55549p-3f, 0x1.5558f4p-5f, 0x1.123a6cp-7f, 0x1.6a2352p-10f,
    };
    static constexpr int STEPS = 2;
    __device__ static __forceinline__ f32 power_of_two(f32 rounded) {
        return __uint_as_float((__float_as_uint(rounded) - 0x4b400000u + 127u) << 23);
    }
};
template <> struct Exponential<f64> {
    static constexpr f64 LEAST = -708, ROUND = 0x1.8p52, HEAD = 6.93145751953125e-1, TAIL = 1.42860682030941723212e-6;
    static constexpr f64 TERMS[] = {
        1, 1, 1. / 2, 1. / 6, 1. / 24, 1. / 120, 1. / 720, 1. / 5040, 1. / 40320, 1. / 362880,
        1. / 3628800, 1. / 39916800, 1. / 479001600, 1. / 6227020800,
    };
    static constexpr int STEPS = 4;
    __device__ static __forceinline__ f64 power_of_two(f64 rounded) {
        const u64 bits = static_cast<u64>(__double_as_longlong(rounded)) - 0x4338000000000000ull + 1023ull;
        return __longlong_as_double(static_cast<i64>(bits << 52));
    }
};

// The polynomial from r^N on, divided by r^N.
template <int N, typename F> __device__ __forceinline__ Real<F> series(Real<F> r) {
    constexpr F factor = Exponential<F>::TERMS[N];
    if constexpr ((N + 1) * sizeof(F) == sizeof(Exponential<F>::TERMS)) return {factor};
    else return fused(series<N + 1>(r), r, Real<F>{factor});
}

// One of two numbers that both are computed: branches take longer.
template <typename F> __device__ __forceinline__ Real<F> choose(bool first, Real<F> a, Real<F> b) {
    return {first ? a.value : b.value};
}

// e^x for x <= 0, with the same bits on every device, which those of a library are not; 0 where it
// is no normal number. NaN stays NaN.
template <typename F> __device__ __forceinline__ Real<F> exponential(Real<F> x) {
    typedef Exponential<F> Of;
    const Real<F> places = fused(x, Real<F>{static_cast<F>(1.4426950408889634)}, Real<F>{Of::ROUND});
    const Real<F> k = places - Real<F>{Of::ROUND};
    const Real<F> r = fused(k, Real<F>{-Of::TAIL}, fused(k, Real<F>{-Of::HEAD}, x));
    const Real<F> power = series<0>(r) * Real<F>{Of::power_of_two(places.value)};
    return choose(x.value < Of::LEAST, Real<F>{0}, power);
}

// 1 / x for x from 1 to 2, without the branches of a division: a polynomial, off by a hundredth, and
// Newton's steps, each of which squares the error.
template <typename F> __device__ __forceinline__ Real<F> reciprocal(Real<F> x) {
    const Real<F> minus = {negative_of(x.value)};
    Real<F> y = fused(x, fused(x, Real<F>{F(32.0 / 99)}, Real<F>{F(-16.0 / 11)}), Real<F>{F(70.0 / 33)});
#pragma unroll
    for (int i = 0; i < Exponential<F>::STEPS; ++i) y = fused(y, fused(minus, y, Real<F>{1}), y);
    return y;
}

// An activated gate, and the derivative of the activation.
struct Activated { A value, slope; };

// With h^2 = e^-|gate|, of which h is no subnormal where its product with the gate is none:
// sigmoid(-|gate|) = h^2 / (1 + h^2).
__device__ __forceinline__ Activated activated(A gate, int silu) {
    typedef decltype(gate.value) F;
    const bool negative = gate.value < 0;
    const A h = exponential(A{magnitude_of(gate.value)} * A{F{-0.5}});
    const A share = reciprocal(fused(h, h, A{1})), part = share * h;
    const A sigmoid = choose(negative, part * h, share), product = gate * part;
    const A value = choose(negative, product * h, gate * share);
    return {choose(silu, value, sigmoid), choose(silu, fused(product, part, sigmoid), part * part)};
}

// The first column of a thread's k-th pack.
__device__ __forceinline__ i64 column_of(i64 k) { return (k * blockDim.x + threadIdx.x) * VEC; }

// A pack of scale: fetched with the row's packs, so that no load waits for the row's sum.
typedef Raw<PARAM_T, VEC> Scale;

__device__ __forceinline__ Scale fetch_scale(bool inside, const PARAM_T* scale, i64 column) {
    return fetch_if<VEC>(inside && scale, scale + column, narrow<PARAM_T>(A{1}));
}

__device__ __forceinline__ void widen_scale(const Layout& layout, const Scale& scale, A (&to)[VEC]) {
    widen(scale, to);
#pragma unroll
    for (int i = 0; i < VEC; ++i) to[i] = shifted(layout, to[i]);
}
