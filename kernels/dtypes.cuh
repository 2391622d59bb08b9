// The four floating dtypes on the device, with no toolkit header.
//
// f16 and bf16 are storage only. `widen` converts to the accumulation type; `narrow<T>` rounds
// once, to nearest even, from float or double. NaN stays NaN, overflow gives infinity.

#pragma once

#include "arithmetic.cuh"

struct f16 { unsigned short bits; };
struct bf16 { unsigned short bits; };
typedef float f32;
typedef double f64;

typedef long long i64;

// EXPECT: a condition that must hold. The emulator checks it; on a GPU it is nothing.
#ifdef GRADKIT_EMULATED
#define __grid_constant__
#define EXPECT(condition) \
    if (!(condition)) __trap()
#else
#define EXPECT(condition)
#define DYNAMIC_SHARED(T, name)                                          \
    extern __shared__ __align__(16) unsigned char name##_bytes[];        \
    T* name = reinterpret_cast<T*>(name##_bytes)
#endif

// One row per dtype: ROW(its number in a tensor list, the type, the accumulation type).
// gradkit's table of dtypes has the same rows. If a row is missing, a norm kernel of that dtype
// does not compile, and a list kernel that meets its number traps (`walk_tensor` in list_walk.cuh).
#define FOR_EACH_DTYPE(ROW) \
    ROW(0, f16, Real<f32>)  \
    ROW(1, bf16, Real<f32>) \
    ROW(2, f32, Real<f32>)  \
    ROW(3, f64, Real<f64>)

// The accumulation type of T.
template <typename T> struct Wide;
#define WIDE_TYPE(number, T, A) \
    template <> struct Wide<T> { typedef A type; };
FOR_EACH_DTYPE(WIDE_TYPE)
#undef WIDE_TYPE

__device__ __forceinline__ Real<f32> widen(f32 x) { return {x}; }
__device__ __forceinline__ Real<f64> widen(f64 x) { return {x}; }
template <typename F> __device__ __forceinline__ Real<F> widen(Real<F> x) { return x; }

__device__ __forceinline__ Real<f32> widen(bf16 x) {
    return {__uint_as_float(static_cast<u32>(x.bits) << 16)};
}

__device__ __forceinline__ Real<f32> widen(f16 x) {
#ifdef GRADKIT_EMULATED
    return {static_cast<float>(__builtin_bit_cast(_Float16, x.bits))};
#else
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return {y};
#endif
}

// Any dtype as a double: exact, subnormals included.
template <typename T> __device__ __forceinline__ double to_double(T x) { return exactly(widen(x)); }

// Rounds to float so that a second rounding, to a type of at most 22 bits, gives the same as one
// rounding of the double: the last bit of an inexact result is set (round to odd).
__device__ __forceinline__ float to_odd(double x) {
    const float y = rounded(x);
    if (exactly(y) == x || x != x) return y;
    u32 bits = __float_as_uint(y);
    if (fabs(exactly(y)) > fabs(x)) bits -= 1;  // towards zero
    return __uint_as_float(bits | 1);
}

template <typename T> __device__ __forceinline__ T narrow(float x);
template <typename T> __device__ __forceinline__ T narrow(double x);

template <> __device__ __forceinline__ f32 narrow<f32>(float x) { return x; }
template <> __device__ __forceinline__ f32 narrow<f32>(double x) { return rounded(x); }
template <> __device__ __forceinline__ f64 narrow<f64>(float x) { return x; }
template <> __device__ __forceinline__ f64 narrow<f64>(double x) { return x; }

template <> __device__ __forceinline__ bf16 narrow<bf16>(float x) {
    u32 bits = __float_as_uint(x);
    bf16 y;
    if (x != x) y.bits = 0x7fff;
    else y.bits = static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
    return y;
}

template <> __device__ __forceinline__ f16 narrow<f16>(float x) {
    f16 y;
#ifdef GRADKIT_EMULATED
    y.bits = __builtin_bit_cast(unsigned short, static_cast<_Float16>(x));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
    return y;
}

template <> __device__ __forceinline__ bf16 narrow<bf16>(double x) { return narrow<bf16>(to_odd(x)); }
template <> __device__ __forceinline__ f16 narrow<f16>(double x) { return narrow<f16>(to_odd(x)); }

template <> __device__ __forceinline__ Real<f32> narrow<Real<f32>>(float x) { return {x}; }
template <> __device__ __forceinline__ Real<f32> narrow<Real<f32>>(double x) { return {rounded(x)}; }
template <> __device__ __forceinline__ Real<f64> narrow<Real<f64>>(double x) { return {x}; }
template <typename T, typename F> __device__ __forceinline__ T narrow(Real<F> x) { return narrow<T>(x.value); }

// Two numbers rounded to 16 bits, the first in the lower half.
template <typename T, typename F> __device__ __forceinline__ u32 narrow_two(Real<F> low, Real<F> high) {
    return narrow<T>(low).bits | static_cast<u32>(narrow<T>(high).bits) << 16;
}
// One instruction where there is one; it also gives 0x7fff for a NaN.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
template <> __device__ __forceinline__ u32 narrow_two<bf16>(Real<f32> low, Real<f32> high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high.value), "f"(low.value));
    return both;
}
#endif

// N elements that one instruction moves; N * sizeof(T) is a power of two up to 16.
template <typename T, int N> struct alignas(sizeof(T) * N) Pack { T at[N]; };
