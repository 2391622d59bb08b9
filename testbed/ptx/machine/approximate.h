// Opcodes whose results are NVIDIA's own tables: here the rounded exact value, which lies within
// the error that PTX states for each. No test may depend on their last bits.
#pragma once

#include "floats.h"

#define APPROXIMATE(name, expression) \
  template <Subnormals S, class T> OP Bits<T> name(Bits<T> operand) { \
    const f64 a = flushed<S>(operand); \
    return finished<S, open, T>(T(expression)); \
  }
APPROXIMATE(rcp_approx, 1 / a)
APPROXIMATE(sqrt_approx, __builtin_sqrt(a))
APPROXIMATE(rsqrt_approx, 1 / __builtin_sqrt(a))
APPROXIMATE(ex2_approx, __builtin_exp2(a))
APPROXIMATE(lg2_approx, __builtin_log2(a))
#undef APPROXIMATE
template <Subnormals S, class T> OP Bits<T> div_approx(Bits<T> left, Bits<T> right) {
  return finished<S, open, T>(flushed<S>(left) / flushed<S>(right));
}
// In double only the upper words take part, and subnormals are flushed.
OP u64 flushed_double(u64 a) { return a & 0x7ff0000000000000ull ? a : a & 0x8000000000000000ull; }
OP u64 rcp_approx_double(u64 a) {
  const f64 upper = as<f64>(flushed_double(a) & 0xffffffff00000000ull);
  return flushed_double(bits(1 / upper) & 0xffffffff00000000ull);
}
OP u64 rsqrt_approx_double(u64 a) {
  const f64 upper = as<f64>(flushed_double(a) & 0xffffffff00000000ull);
  return flushed_double(bits(1 / __builtin_sqrt(upper)) & 0xffffffff00000000ull);
}
