// Integer and logic opcodes.
#pragma once

#include "bits.h"

// A 64-bit multiplication of the values, cut to what the result holds.
template <class T> OP Bits<T> add(Bits<T> a, Bits<T> b) { return Bits<T>(a + b); }
template <class T> OP Bits<T> sub(Bits<T> a, Bits<T> b) { return Bits<T>(a - b); }
template <Part P, class T> OP auto mul(Bits<T> a, Bits<T> b) {
  if constexpr (P == low) return Bits<T>(u64(a) * b);
  else if constexpr (P == wide && is_signed<T>) return typename Unsigned<2 * sizeof(T)>::type(s64(T(a)) * T(b));
  else if constexpr (P == wide) return typename Unsigned<2 * sizeof(T)>::type(u64(a) * b);
  else if constexpr (is_signed<T>) return Bits<T>((__int128)T(a) * T(b) >> width<T>);
  else return Bits<T>((unsigned __int128)a * b >> width<T>);
}
template <Part P, class T, class C> OP auto mad(Bits<T> a, Bits<T> b, C c) {
  const auto product = mul<P, T>(a, b);
  static_assert(sizeof product == sizeof c);
  return C(product + c);
}
// By zero, where PTX leaves the result open: all ones, and `a` is what remains. The least integer
// by -1 wraps.
template <class T> OP Bits<T> div(Bits<T> a, Bits<T> b) {
  if (!b) return Bits<T>(-1);
  if (is_signed<T> && b == Bits<T>(-1)) return Bits<T>(-a);
  return Bits<T>(T(a) / T(b));
}
template <class T> OP Bits<T> rem(Bits<T> a, Bits<T> b) {
  if (!b) return a;
  if (is_signed<T> && b == Bits<T>(-1)) return 0;
  return Bits<T>(T(a) % T(b));
}
template <class T> OP Bits<T> abs(Bits<T> a) { return T(a) < 0 ? Bits<T>(-a) : a; }
template <class T> OP Bits<T> neg(Bits<T> a) { return Bits<T>(-a); }
template <class T> OP Bits<T> min(Bits<T> a, Bits<T> b) { return T(a) < T(b) ? a : b; }
template <class T> OP Bits<T> max(Bits<T> a, Bits<T> b) { return T(a) > T(b) ? a : b; }
template <class T> OP Bits<T> sad(Bits<T> a, Bits<T> b, Bits<T> c) {
  return Bits<T>(c + (T(a) < T(b) ? b - a : a - b));
}

template <class T> OP Bits<T> and_(Bits<T> a, Bits<T> b) { return a & b; }
template <class T> OP Bits<T> or_(Bits<T> a, Bits<T> b) { return a | b; }
template <class T> OP Bits<T> xor_(Bits<T> a, Bits<T> b) { return a ^ b; }
template <class T> OP Bits<T> not_(Bits<T> a) {
  if constexpr (same<T, pred>) return !a;
  else return Bits<T>(~a);
}
template <class T> OP Bits<T> cnot(Bits<T> a) { return a == 0; }
// Shifts of the whole width and more leave nothing but the sign.
template <class T> OP Bits<T> shl(Bits<T> a, u32 n) { return n < width<T> ? Bits<T>(a << n) : 0; }
template <class T> OP Bits<T> shr(Bits<T> a, u32 n) {
  if (n < width<T>) return Bits<T>(T(a) >> n);
  return T(a) < 0 ? Bits<T>(-1) : 0;
}
enum Direction { l, r };
enum Shift { wrap, clamp };
template <Direction D, Shift S> OP u32 shf(u32 a, u32 b, u32 c) {
  const u32 n = S == wrap ? c & 31 : c < 32 ? c : 32;
  const u64 both = u64(b) << 32 | a;
  return D == l ? u32(both << n >> 32) : u32(both >> n);
}

template <class T> OP u32 popc(Bits<T> a) { return __builtin_popcountll(a); }
template <class T> OP u32 clz(Bits<T> a) { return a ? __builtin_clzll(a) - (64 - width<T>) : width<T>; }
template <class T> OP Bits<T> brev(Bits<T> a) {
  Bits<T> d = 0;
  for (int i = 0; i < width<T>; ++i) d |= Bits<T>(a >> i & 1) << (width<T> - 1 - i);
  return d;
}
// The position of the highest bit that is not the sign's; all ones if there is none.
template <class T> OP u32 bfind(Bits<T> a) {
  if (T(a) < 0) a = Bits<T>(~a);
  return a ? width<T> - 1 - clz<T>(a) : ~0u;
}
template <class T> OP Bits<T> field(u32 n) { return n < width<T> ? (Bits<T>(1) << n) - 1 : Bits<T>(-1); }
template <class T> OP Bits<T> bfe(Bits<T> a, u32 at, u32 n) {
  at &= 255, n &= 255;
  const u32 last = at + n - 1 < width<T> - 1 ? at + n - 1 : width<T> - 1;
  const bool ones = is_signed<T> && n && (a >> last & 1);
  const Bits<T> taken = at < width<T> ? (a >> at) & field<T>(n) : 0;
  const u32 filled = at < width<T> ? (n < width<T> - at ? n : width<T> - at) : 0;
  return ones ? Bits<T>(taken | ~field<T>(filled)) : taken;
}
template <class T> OP Bits<T> bfi(Bits<T> a, Bits<T> b, u32 at, u32 n) {
  at &= 255, n &= 255;
  if (at >= width<T>) return b;
  const Bits<T> mask = field<T>(n) << at;
  return Bits<T>((a << at & mask) | (b & ~mask));
}
// Bit by bit: the bit of `table` that the bits of a, b and c number.
OP u32 lop3(u32 a, u32 b, u32 c, u32 table) {
  u32 d = 0;
  for (int k = 0; k < 8; ++k)
    if (table >> k & 1) d |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
  return d;
}
// Four of the eight bytes of b and a; how `selector` chooses them is the mode's.
enum Permute { any, f4e, b4e, rc8, ecl, ecr, rc16 };
template <Permute P> OP u32 prmt(u32 a, u32 b, u32 selector) {
  const u64 both = u64(b) << 32 | a;
  const int k = selector & 3;
  u32 d = 0;
  for (int i = 0; i < 4; ++i) {
    int from = 0;
    switch (P) {
      case any: from = selector >> 4 * i & 7; break;
      case f4e: from = k + i; break;
      case b4e: from = (k - i) & 7; break;
      case rc8: from = k; break;
      case ecl: from = i > k ? i : k; break;
      case ecr: from = i < k ? i : k; break;
      case rc16: from = 2 * (k & 1) + (i & 1); break;
    }
    u32 byte = both >> 8 * from & 255;
    if (P == any && (selector >> 4 * i & 8)) byte = byte & 128 ? 255 : 0;
    d |= byte << 8 * i;
  }
  return d;
}

template <class T> OP Bits<T> selp(Bits<T> a, Bits<T> b, u8 p) { return p ? a : b; }
template <Compare C, class T> OP u8 setp(Bits<T> a, Bits<T> b) {
  if constexpr (C == eq) return a == b;
  else if constexpr (C == ne) return a != b;
  else if constexpr (C == lt) return T(a) < T(b);
  else if constexpr (C == le) return T(a) <= T(b);
  else if constexpr (C == gt) return T(a) > T(b);
  else if constexpr (C == ge) return T(a) >= T(b);
  else if constexpr (C == lo) return a < b;
  else if constexpr (C == ls) return a <= b;
  else if constexpr (C == hi) return a > b;
  else return a >= b;
}
