// Activated gates, and the derivatives of their activations, of the same bits on every processor.
//
// Included once for each instruction set, as floats.h is.

#pragma once

#include "floats.h"

namespace ISA {

// The least argument whose exponential is a normal number; what rounds to an integer; log 2 in two
// parts, of which multiples of the first are exact; the terms of a series that leaves half a unit
// between the halves of log 2; the place of the exponent, and that of 1.
template <typename A> struct Exponential;
template <> struct Exponential<float> {
    typedef uint32_t Bits;
    static constexpr float LEAST = -87, ROUND = 0x1.8p23f, HEAD = 0.693359375f, TAIL = -2.12194440e-4f;
    static constexpr int TERMS = 7, PLACE = 23, ONE = 127;
};
template <> struct Exponential<double> {
    typedef uint64_t Bits;
    static constexpr double LEAST = -708, ROUND = 0x1.8p52, HEAD = 6.93145751953125e-1, TAIL = 1.42860682030941723212e-6;
    static constexpr int TERMS = 13, PLACE = 52, ONE = 1023;
};

// e^x for x <= 0; 0 where it is no normal number. NaN stays NaN.
template <typename A> INLINE A exponential(A x) {
    typedef Exponential<A> Of;
    typedef typename Of::Bits Bits;
    const A known = x < Of::LEAST ? Of::LEAST : x;
    const A places = known * static_cast<A>(1.4426950408889634) + Of::ROUND, k = places - Of::ROUND;
    const A r = known - k * Of::HEAD - k * Of::TAIL;
    A series = 1;
#pragma GCC unroll 16
    for (int n = Of::TERMS; n > 0; --n) series = series * (r * static_cast<A>(1.0 / n)) + 1;
    // NaN has any bits here, and stays what it is.
    const Bits power = bits_of<Bits>(places) - bits_of<Bits>(Of::ROUND) + Of::ONE;
    const A found = series * bits_of<A>(power << Of::PLACE);
    return x < Of::LEAST ? 0 : found;
}

template <typename A> struct Activated {
    A value, slope;
};

// With h^2 = e^-|gate|, of which h is no subnormal where its product with the gate is none:
// sigmoid(-|gate|) = h^2 / (1 + h^2).
template <typename A, bool SILU> INLINE Activated<A> activated(A gate) {
    const A h = exponential(gate * static_cast<A>(gate < 0 ? 0.5 : -0.5));
    const A share = 1 / (1 + h * h), falling = gate < 0 ? h : 1, part = share * h;
    const A sigmoid = share * falling * falling;
    if (!SILU) return {sigmoid, part * part};
    return {gate * share * falling * falling, sigmoid + gate * part * part};
}

}  // namespace ISA
