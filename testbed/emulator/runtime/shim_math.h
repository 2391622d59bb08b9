// CUDA's arithmetic and bit-cast intrinsics, by the compiler's builtins.
#pragma once

#define EMU_MATH_1(name) \
  extern "C" float name##f(float) noexcept; \
  extern "C" double name(double) noexcept; \
  static inline float name(float x) { return name##f(x); }
#define EMU_MATH_2(name) \
  extern "C" float name##f(float, float) noexcept; \
  extern "C" double name(double, double) noexcept; \
  static inline float name(float x, float y) { return name##f(x, y); }

EMU_MATH_1(fabs)
EMU_MATH_1(sqrt)
EMU_MATH_1(exp)
EMU_MATH_1(exp2)
EMU_MATH_1(log)
EMU_MATH_1(log2)
EMU_MATH_1(cbrt)
EMU_MATH_1(floor)
EMU_MATH_1(ceil)
EMU_MATH_1(trunc)
EMU_MATH_1(rint)
EMU_MATH_2(pow)
EMU_MATH_2(fmin)
EMU_MATH_2(fmax)
EMU_MATH_2(fmod)
EMU_MATH_2(copysign)
extern "C" float fmaf(float, float, float) noexcept;
extern "C" double fma(double, double, double) noexcept;
extern "C" float ldexpf(float, int) noexcept;
extern "C" double ldexp(double, int) noexcept;
extern "C" double frexp(double, int*) noexcept;
static inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
static inline float ldexp(float x, int e) { return ldexpf(x, e); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float rsqrt(float x) { return 1.0f / sqrtf(x); }
static inline double rsqrt(double x) { return 1.0 / sqrt(x); }

// Rounding as named, with no contraction into a fused multiply-add.
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __fmul_rn(float x, float y) { return x * y; }
static inline float __fsub_rn(float x, float y) { return x - y; }
static inline float __fdiv_rn(float x, float y) { return x / y; }
static inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
static inline float __fsqrt_rn(float x) { return sqrtf(x); }
static inline double __dadd_rn(double x, double y) { return x + y; }
static inline double __dmul_rn(double x, double y) { return x * y; }
static inline double __dsub_rn(double x, double y) { return x - y; }
static inline double __ddiv_rn(double x, double y) { return x / y; }
static inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
static inline double __dsqrt_rn(double x) { return sqrt(x); }

#define isnan(x) __builtin_isnan(x)
#define isinf(x) (__builtin_isinf(x) != 0)
#define isfinite(x) __builtin_isfinite(x)
#define signbit(x) (__builtin_signbit(x) != 0)

#define EMU_MIN_MAX(T) \
  static inline T min(T a, T b) { return b < a ? b : a; } \
  static inline T max(T a, T b) { return a < b ? b : a; }
EMU_MIN_MAX(int)
EMU_MIN_MAX(unsigned)
EMU_MIN_MAX(long)
EMU_MIN_MAX(unsigned long)
EMU_MIN_MAX(long long)
EMU_MIN_MAX(unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

template <class To, class From>
static __forceinline__ To emu_bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To result;
  __builtin_memcpy(&result, &value, sizeof result);
  return result;
}
static inline unsigned __float_as_uint(float x) { return emu_bit_cast<unsigned>(x); }
static inline int __float_as_int(float x) { return emu_bit_cast<int>(x); }
static inline float __uint_as_float(unsigned x) { return emu_bit_cast<float>(x); }
static inline float __int_as_float(int x) { return emu_bit_cast<float>(x); }
static inline long long __double_as_longlong(double x) { return emu_bit_cast<long long>(x); }
static inline double __longlong_as_double(long long x) { return emu_bit_cast<double>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (n & 31));
}
static inline unsigned __umulhi(unsigned a, unsigned b) {
  return (unsigned)(((unsigned long long)a * b) >> 32);
}
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
