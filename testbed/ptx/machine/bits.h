// Registers are bits, whatever they hold: u8 for predicates, u16, u32 and u64 for all else.
// An opcode is a function from bits to bits; its modifiers are template arguments, in PTX's order.
#pragma once

typedef unsigned char u8, b8;
typedef unsigned short u16, b16;
typedef unsigned u32, b32;
typedef unsigned long long u64, b64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;
typedef float f32;
typedef double f64;

// Formats that C++ has no arithmetic for.
struct pred { u8 bits; };
struct f16 { u16 bits; };
struct bf16 { u16 bits; };
struct f16x2 { u32 bits; };
struct bf16x2 { u32 bits; };
struct f32x2 { u64 bits; };

#define OP static inline __attribute__((always_inline))

template <unsigned long size> struct Unsigned;
template <> struct Unsigned<1> { typedef u8 type; };
template <> struct Unsigned<2> { typedef u16 type; };
template <> struct Unsigned<4> { typedef u32 type; };
template <> struct Unsigned<8> { typedef u64 type; };
template <class T> using Bits = typename Unsigned<sizeof(T)>::type;

template <class To, class From> OP To as(From x) { return __builtin_bit_cast(To, x); }
template <class T> OP Bits<T> bits(T x) { return as<Bits<T>>(x); }

template <class A, class B> inline constexpr bool same = false;
template <class A> inline constexpr bool same<A, A> = true;
template <class T> inline constexpr bool floating = same<T, f32> || same<T, f64>;
template <class T> inline constexpr int width = 8 * sizeof(T);
template <class T> inline constexpr bool is_signed = T(-1) < T(0);

enum Compare { eq, ne, lt, le, gt, ge, lo, ls, hi, hs, equ, neu, ltu, leu, gtu, geu, num, nan };
enum Part { low, high, wide };
enum Rounding { rn, rz, rm, rp };          // to nearest even, toward zero, down, up
enum Integral { rni, rzi, rmi, rpi };      // the same, to an integer
enum Subnormals { keep, ftz };             // flush to zero, with the sign
enum Range { open, sat };                  // clamp to [0, 1], or to the integer's range
enum Nans { number, NaN };                 // min and max: which operand wins
