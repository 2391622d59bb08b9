// Exact sums of |x| or x * x: the same for any order of elements, threads or ranks.

#pragma once

#include "arrays.h"

// A sum is a whole number of 2^-320, in digits of 32 bits, least significant first. 2^-298 is the
// square of the least float32, and 2^320 above the sum of 2^64 of the largest ones' squares.
constexpr int DIGITS = 22, DIGIT_BITS = 32, LEAST_BIT = -320;

struct ExactSum {
    i64 digits[DIGITS];
    double beyond;  // the sum of the magnitudes that are infinite or NaN
};

// += over `count` elements without gaps. `order` is 1 or 2, `dtype` not F64.
typedef void (*AddExactly)(Dtype dtype, int order, const void* data, i64 count, ExactSum& sum);

#ifdef GRADKIT_X86_64
namespace x86_64_v4 {
void add_exactly(Dtype, int, const void*, i64, ExactSum&);
}
namespace x86_64_v3 {
void add_exactly(Dtype, int, const void*, i64, ExactSum&);
}
#endif
namespace baseline {
void add_exactly(Dtype, int, const void*, i64, ExactSum&);
}
