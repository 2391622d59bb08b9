// Floating-point opcodes on f32 and f64.
//
// Flushing takes place before the operation, on operands, and after it, on the rounded result. A
// result in f32 that is NaN is always 0x7fffffff; in f64 it is one that the host makes.
#pragma once

#include <fenv.h>

#include "bits.h"

template <class T> OP T infinity() { return T(__builtin_inf()); }

template <Subnormals S> OP f32 flushed(u32 a) {
  return as<f32>(S == ftz && !(a & 0x7f800000u) ? a & 0x80000000u : a);
}
template <Subnormals S> OP f64 flushed(u64 a) { return as<f64>(a); }
OP u32 canonical(f32 x) { return x != x ? 0x7fffffffu : bits(x); }
OP u64 canonical(f64 x) { return bits(x); }

template <Subnormals S, Range C = open, class T> OP Bits<T> finished(T x) {
  if (C == sat) x = x > T(0) ? x < T(1) ? x : T(1) : T(0);  // NaN too becomes 0
  return bits(flushed<S>(canonical(x)));
}

// Opaque to the compiler, which would otherwise move arithmetic out of another rounding mode.
template <class T> OP T opaque(T x) {
  asm volatile("" : "+m"(x));
  return x;
}
template <Rounding R, class T, class F> OP T rounded(F compute) {
  if constexpr (R == rn) {
    return compute();
  } else {
    const int before = fegetround();
    fesetround(R == rz ? FE_TOWARDZERO : R == rm ? FE_DOWNWARD : FE_UPWARD);
    const T result = opaque(compute());
    fesetround(before);
    return result;
  }
}

#define ROUNDED_2(name, expression) \
  template <Rounding R, Subnormals S, Range C, class T> OP Bits<T> name(Bits<T> left, Bits<T> right) { \
    T a = flushed<S>(left), b = flushed<S>(right); \
    if (R != rn) a = opaque(a), b = opaque(b); \
    return finished<S, C, T>(rounded<R, T>([&] { return expression; })); \
  }
ROUNDED_2(add, a + b)
ROUNDED_2(sub, a - b)
ROUNDED_2(mul, a * b)
ROUNDED_2(div, a / b)
#undef ROUNDED_2

OP f32 fused(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
OP f64 fused(f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); }
template <Rounding R, Subnormals S, Range C, class T>
OP Bits<T> fma(Bits<T> left, Bits<T> right, Bits<T> addend) {
  T a = flushed<S>(left), b = flushed<S>(right), c = flushed<S>(addend);
  if (R != rn) a = opaque(a), b = opaque(b), c = opaque(c);
  return finished<S, C, T>(rounded<R, T>([&] { return fused(a, b, c); }));
}

OP f32 root(f32 a) { return __builtin_sqrtf(a); }
OP f64 root(f64 a) { return __builtin_sqrt(a); }
template <Rounding R, Subnormals S, class T> OP Bits<T> sqrt(Bits<T> operand) {
  T a = flushed<S>(operand);
  if (R != rn) a = opaque(a);
  return finished<S, open, T>(rounded<R, T>([&] { return root(a); }));
}
template <Rounding R, Subnormals S, class T> OP Bits<T> rcp(Bits<T> operand) {
  T a = flushed<S>(operand);
  if (R != rn) a = opaque(a);
  return finished<S, open, T>(rounded<R, T>([&] { return T(1) / a; }));
}

// Two f32 side by side.
#define PAIRED(name, ...) \
  template <Rounding R, Subnormals S> OP u64 name##_pair(__VA_ARGS__)
PAIRED(add, u64 a, u64 b) {
  return u64(add<R, S, open, f32>(a >> 32, b >> 32)) << 32 | add<R, S, open, f32>(u32(a), u32(b));
}
PAIRED(sub, u64 a, u64 b) {
  return u64(sub<R, S, open, f32>(a >> 32, b >> 32)) << 32 | sub<R, S, open, f32>(u32(a), u32(b));
}
PAIRED(mul, u64 a, u64 b) {
  return u64(mul<R, S, open, f32>(a >> 32, b >> 32)) << 32 | mul<R, S, open, f32>(u32(a), u32(b));
}
PAIRED(fma, u64 a, u64 b, u64 c) {
  return u64(fma<R, S, open, f32>(a >> 32, b >> 32, c >> 32)) << 32 |
         fma<R, S, open, f32>(u32(a), u32(b), u32(c));
}
#undef PAIRED

template <class T> inline constexpr Bits<T> sign_bit = Bits<T>(1) << (width<T> - 1);
// The sign of a NaN is PTX's to choose; here it follows the same rule as a number's.
template <Subnormals S, class T> OP Bits<T> abs(Bits<T> a) { return bits(flushed<S>(a)) & ~sign_bit<T>; }
template <Subnormals S, class T> OP Bits<T> neg(Bits<T> a) { return bits(flushed<S>(a)) ^ sign_bit<T>; }
template <class T> OP Bits<T> copysign(Bits<T> sign, Bits<T> a) {
  return (a & ~sign_bit<T>) | (sign & sign_bit<T>);
}

// -0 is below +0. Of a number and a NaN the number wins, unless NaN is asked for.
template <Subnormals S, Nans N, class T> OP Bits<T> min(Bits<T> left, Bits<T> right) {
  const T a = flushed<S>(left), b = flushed<S>(right);
  if (a != a || b != b) {
    if (N == NaN || (a != a && b != b)) return canonical(a + b);
    return bits(a != a ? b : a);
  }
  if (a == b) return bits(a) | bits(b);  // equal but for the sign of zero
  return bits(a < b ? a : b);
}
template <Subnormals S, Nans N, class T> OP Bits<T> max(Bits<T> left, Bits<T> right) {
  const T a = flushed<S>(left), b = flushed<S>(right);
  if (a != a || b != b) {
    if (N == NaN || (a != a && b != b)) return canonical(a + b);
    return bits(a != a ? b : a);
  }
  if (a == b) return bits(a) & bits(b);
  return bits(a < b ? b : a);
}

// The forms that end in u are true for NaN.
template <Compare C, Subnormals S, class T> OP u8 setp(Bits<T> left, Bits<T> right) {
  const T a = flushed<S>(left), b = flushed<S>(right);
  const bool unordered = a != a || b != b;
  switch (C) {
    case eq: return a == b;
    case ne: return !unordered && a != b;
    case lt: return a < b;
    case le: return a <= b;
    case gt: return a > b;
    case ge: return a >= b;
    case equ: return unordered || a == b;
    case neu: return a != b;
    case ltu: return unordered || a < b;
    case leu: return unordered || a <= b;
    case gtu: return unordered || a > b;
    case geu: return unordered || a >= b;
    case num: return !unordered;
    default: return unordered;
  }
}
template <Subnormals S, class T> OP Bits<T> slct(Bits<T> a, Bits<T> b, u32 c) {
  return flushed<S>(c) >= 0 ? a : b;
}
template <class T> OP Bits<T> slct_by_integer(Bits<T> a, Bits<T> b, u32 c) { return s32(c) >= 0 ? a : b; }

enum Property { finite, infinite, a_number, notanumber, normal, subnormal };
template <Property P, class T> OP u8 testp(Bits<T> a) {
  const Bits<T> magnitude = a & ~sign_bit<T>, top = bits(infinity<T>());
  const Bits<T> least = same<T, f32> ? Bits<T>(0x00800000u) : Bits<T>(0x0010000000000000ull);
  switch (P) {
    case finite: return magnitude < top;
    case infinite: return magnitude == top;
    case a_number: return magnitude <= top;
    case notanumber: return magnitude > top;
    case normal: return magnitude >= least && magnitude < top;
    default: return magnitude && magnitude < least;
  }
}
