// Powers of positive numbers, of the same bits on every processor, which those of a library are not.
//
// The relative error of a power x^p is some units, times the size of log2(x^p): below 2^-44 for
// what counts in a sum beside 1. Included once for each instruction set, as floats.h is.

#pragma once

#include "floats.h"

namespace ISA {

constexpr double TO_INTEGER = 0x1.8p52;  // rounds what it is added to, and holds it as low bits

INLINE double power_of_two(double exponent) {
    const int64_t bits = bits_of<int64_t>(exponent + TO_INTEGER) - bits_of<int64_t>(TO_INTEGER);
    return bits_of<double>((bits + 1023) << 52);
}

// log2 of a normal number: of its exponent and of a fraction f between the roots of 1/2 and 2,
// log f = 2 artanh((f - 1) / (f + 1)).
INLINE double log2_of(double x) {
    constexpr int64_t ROOT = 0x3fe6a09e667f3bcd, UP = int64_t{1100} << 52;
    const int64_t bits = bits_of<int64_t>(x);
    const uint64_t exponent = static_cast<uint64_t>(bits - ROOT + UP) >> 52;
    const double fraction = bits_of<double>(
        static_cast<uint64_t>(bits) - (exponent << 52) + static_cast<uint64_t>(UP)
    );
    const double s = (fraction - 1) / (fraction + 1), z = s * s;
    double series = 1.0 / 23;
#pragma GCC unroll 16
    for (int odd = 21; odd >= 3; odd -= 2) series = series * z + 1.0 / odd;
    const double whole =
        bits_of<double>(static_cast<int64_t>(exponent) + bits_of<int64_t>(TO_INTEGER)) -
        (TO_INTEGER + 1100);
    return whole + (s + s * z * series) * 0x1.71547652b82fep+1;  // 2 / log(2)
}

INLINE double exp2_of(double x) {
    const double held = x < -2000 ? -2000 : x > 2000 ? 2000 : x;
    const double whole = (held + TO_INTEGER) - TO_INTEGER;
    const double rest = (held - whole) * 0x1.62e42fefa39efp-1;  // log(2)
    double series = 1;
#pragma GCC unroll 16
    for (int n = 14; n >= 1; --n) series = series * rest / n + 1;
    const double first = whole < -1000 ? -1000 : whole > 1000 ? 1000 : whole;
    return series * power_of_two(first) * power_of_two(whole - first);
}

// (x / largest)^p of a number that is at least 0 and at most the largest, which is finite.
INLINE double power_of_ratio(double x, double largest, double p) {
    const bool tiny = x < largest * 0x1p-900;  // the ratio may have no exponent
    const double ratio = (tiny ? x * 0x1p200 : x) / largest;
    const double power = exp2_of(p * (log2_of(ratio) - (tiny ? 200 : 0)));
    return x == 0 ? 0 : power;
}

}  // namespace ISA
