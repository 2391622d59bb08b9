// cvt: between integers, between formats of floating-point numbers, and across.
#pragma once

#include "floats.h"

// Integers: the low bits, or the nearest value that the type has.
template <Range C, class To, class From> OP Bits<To> cvt(Bits<From> operand) {
  const From a = From(operand);
  if constexpr (C == open) {
    return Bits<To>(To(a));
  } else {
    constexpr __int128 most = is_signed<To> ? Bits<To>(-1) >> 1 : Bits<To>(-1);
    constexpr __int128 least = is_signed<To> ? -most - 1 : 0;
    const __int128 value = a;
    return Bits<To>(value < least ? least : value > most ? most : value);
  }
}

template <Rounding R, class To, class From> OP Bits<To> from_integer(Bits<From> operand) {
  From a = From(operand);
  if (R != rn) a = opaque(a);
  return bits(rounded<R, To>([&] { return To(a); }));
}

template <Integral R, class T> OP T integral(T x) {
  switch (R) {
    case rni: return T(__builtin_rint(x));  // the host's mode is to nearest even
    case rzi: return T(__builtin_trunc(x));
    case rmi: return T(__builtin_floor(x));
    default: return T(__builtin_ceil(x));
  }
}
template <Integral R, Subnormals S, class T> OP Bits<T> to_integral(Bits<T> a) {
  return finished<S, open, T>(integral<R, T>(flushed<S>(a)));
}
// Clamped to what the integer holds, always; NaN becomes 0.
template <Integral R, Subnormals S, class To, class From> OP Bits<To> to_integer(Bits<From> a) {
  const f64 x = integral<R, f64>(flushed<S>(a));
  constexpr Bits<To> most = is_signed<To> ? Bits<To>(-1) >> 1 : Bits<To>(-1);
  const f64 past = 2 * f64(Bits<To>(1) << (width<To> - 1)) / (is_signed<To> ? 2 : 1);
  if (x != x) return 0;
  if (x >= past) return most;
  if (x < (is_signed<To> ? -past : 0)) return is_signed<To> ? Bits<To>(most + 1) : 0;
  return Bits<To>(To(x));
}

template <Subnormals S> OP u32 saturated(u32 a) { return finished<S, sat, f32>(flushed<S>(a)); }

// Between f32 and f64; a widening is exact.
template <Subnormals S> OP u64 widened(u32 a) { return bits(f64(flushed<S>(a))); }
template <Rounding R, Subnormals S, Range C> OP u32 narrowed(u64 operand) {
  f64 a = as<f64>(operand);
  if (R != rn) a = opaque(a);
  return finished<S, C, f32>(rounded<R, f32>([&] { return f32(a); }));
}

// The 16-bit formats, by the number of bits of exponent and fraction.
template <class T> inline constexpr int fraction = same<T, f16> ? 10 : 7;
template <class T> inline constexpr int bias = same<T, f16> ? 15 : 127;
template <class T> inline constexpr u16 infinite_16 = same<T, f16> ? 0x7c00 : 0x7f80;

template <class T> OP f64 value_of(u16 a) {
  const int exponent = (a & 0x7fff) >> fraction<T>;
  const int significand = a & ((1 << fraction<T>) - 1);
  f64 x;
  if ((a & 0x7fff) >= infinite_16<T>) x = significand ? __builtin_nan("") : __builtin_inf();
  else if (exponent) x = __builtin_ldexp(significand + (1 << fraction<T>), exponent - bias<T> - fraction<T>);
  else x = __builtin_ldexp(significand, 1 - bias<T> - fraction<T>);
  return a & 0x8000 ? -x : x;
}
template <class T> OP u32 to_f32(u16 a) {
  if constexpr (same<T, bf16>) return u32(a) << 16;
  else return canonical(f32(value_of<T>(a)));
}
template <class T> OP u64 to_f64(u16 a) { return bits(value_of<T>(a)); }

// Rounds once, whatever the format of the operand was.
template <Rounding R, class T> OP u16 to_16(f64 x) {
  const u64 all = bits(x), magnitude = all & ~sign_bit<f64>;
  const u16 sign = all >> 48 & 0x8000;
  if (x != x) return 0x7fff;
  if (magnitude == bits(__builtin_inf())) return sign | infinite_16<T>;
  int exponent = int(magnitude >> 52) - 1023;  // an f64 below its normal range rounds to 0 here
  const u64 significand = exponent == -1023 ? 0 : (magnitude & ((1ull << 52) - 1)) | 1ull << 52;
  const int lowest = 1 - bias<T>;
  int dropped = 52 - fraction<T> + (exponent < lowest ? lowest - exponent : 0);
  if (dropped > 54) dropped = 54;
  u64 kept = significand >> dropped;
  const u64 rest = significand & ((1ull << dropped) - 1), half = 1ull << (dropped - 1);
  if (R == rn && (rest > half || (rest == half && (kept & 1)))) ++kept;
  // The leading bit of a normal number adds one to the exponent; so does a carry.
  const u64 result = (u64(exponent < lowest ? 0 : exponent - lowest) << fraction<T>) + kept;
  if (result >= infinite_16<T>) return sign | (R == rn ? infinite_16<T> : infinite_16<T> - 1);
  return sign | u16(result);
}
enum Negatives { signed_, relu };  // relu: what is below 0 becomes +0
template <Rounding R, Negatives N, class T, class From> OP u16 narrowed_16(Bits<From> a) {
  const u16 result = to_16<R, T>(f64(as<From>(a)));
  return N == relu && (result & 0x8000) ? 0 : result;
}
// The first operand goes into the upper half.
template <Rounding R, Negatives N, class T> OP u32 packed_16(u32 a, u32 b) {
  return u32(narrowed_16<R, N, T, f32>(a)) << 16 | narrowed_16<R, N, T, f32>(b);
}
