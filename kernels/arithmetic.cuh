// Arithmetic exactly as written: each operation rounds once and keeps subnormals.
//
// CuPy compiles with -ftz=true, which flushes the subnormals of plain float operations to zero, and
// a compiler may fuse a plain product and a sum. `Real` does neither. So results do not depend on
// the compiler, and small gradients keep their precision.

#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef GRADKIT_EMULATED
#define EMULATED 1
#else
#define EMULATED 0
#endif

// For headers that CPUs share.
#define INLINE __device__ __forceinline__
#define NOT_A_DOUBLE __longlong_as_double(0x7ff8000000000000)

#define LARGEST 0x1.fffffffffffffp1023  // of all doubles

// Conversions between float and double; a plain cast would flush subnormals.
__device__ __forceinline__ double exactly(float x) {
#ifdef GRADKIT_EMULATED
    return x;
#else
    double y;
    asm("cvt.f64.f32 %0, %1;" : "=d"(y) : "f"(x));
    return y;
#endif
}

// The float with these bits. If they were one before, NVRTC would take the loss of a sign bit for
// a magnitude, and on sm_120 compute that by an instruction which flushes subnormals.
__device__ __forceinline__ double exactly_of_bits(u32 bits) {
#ifdef GRADKIT_EMULATED
    return exactly(__uint_as_float(bits));
#else
    double y;
    asm("{ .reg .f32 x; mov.b32 x, %1; cvt.f64.f32 %0, x; }" : "=d"(y) : "r"(bits));
    return y;
#endif
}

__device__ __forceinline__ float rounded(double x) {
#ifdef GRADKIT_EMULATED
    return static_cast<float>(x);
#else
    float y;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(y) : "d"(x));
    return y;
#endif
}

// CUDA's intrinsics for float flush; PTX has instructions that do not.
#ifdef GRADKIT_EMULATED
#define SINGLE_OPERATION(name, instruction, operator)                       \
    __device__ __forceinline__ float name(float a, float b) { return a operator b; }
#else
#define SINGLE_OPERATION(name, instruction, operator)                       \
    __device__ __forceinline__ float name(float a, float b) {               \
        float y;                                                            \
        asm(instruction " %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));         \
        return y;                                                           \
    }
#endif
SINGLE_OPERATION(sum_of, "add.rn.f32", +)
SINGLE_OPERATION(difference_of, "sub.rn.f32", -)
SINGLE_OPERATION(product_of, "mul.rn.f32", *)
SINGLE_OPERATION(quotient_of, "div.rn.f32", /)
#undef SINGLE_OPERATION

// A sign changes no other bit of a float either: CUDA's own - and fabsf would flush it.
#ifdef GRADKIT_EMULATED
__device__ __forceinline__ float negative_of(float x) { return -x; }
__device__ __forceinline__ float magnitude_of(float x) { return fabsf(x); }
#else
__device__ __forceinline__ float negative_of(float x) {
    float y;
    asm("neg.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float magnitude_of(float x) {
    float y;
    asm("abs.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#endif

__device__ __forceinline__ double negative_of(double x) { return -x; }
__device__ __forceinline__ double magnitude_of(double x) { return fabs(x); }
__device__ __forceinline__ double sum_of(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double difference_of(double a, double b) { return __dsub_rn(a, b); }
__device__ __forceinline__ double product_of(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ double quotient_of(double a, double b) { return __ddiv_rn(a, b); }

// a * b + c, rounded once.
__device__ __forceinline__ double fused(double a, double b, double c) { return __fma_rn(a, b, c); }
__device__ __forceinline__ float fused(float a, float b, float c) {
#ifdef GRADKIT_EMULATED
    return __fmaf_rn(a, b, c);
#else
    float y;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
    return y;
#endif
}

// Two floats, computed with as if each were alone: by one instruction where there is one, on compute capability
// 10.0 and 10.3.
struct Two { float first, second; };

#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 1000 || __CUDA_ARCH__ == 1030)
#define TWO_AT_ONCE 1
__device__ __forceinline__ u64 bits_of(Two x) {
    u64 bits;
    asm("mov.b64 %0, {%1, %2};" : "=l"(bits) : "f"(x.first), "f"(x.second));
    return bits;
}
__device__ __forceinline__ Two two_of(u64 bits) {
    Two x;
    asm("mov.b64 {%0, %1}, %2;" : "=f"(x.first), "=f"(x.second) : "l"(bits));
    return x;
}
#define OPERATION_ON_TWO(name, instruction)                                          \
    __device__ __forceinline__ Two name(Two a, Two b) {                              \
        u64 y;                                                                       \
        asm(instruction " %0, %1, %2;" : "=l"(y) : "l"(bits_of(a)), "l"(bits_of(b))); \
        return two_of(y);                                                            \
    }
__device__ __forceinline__ Two fused(Two a, Two b, Two c) {
    u64 y;
    asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(y) : "l"(bits_of(a)), "l"(bits_of(b)), "l"(bits_of(c)));
    return two_of(y);
}
#else
#define TWO_AT_ONCE EMULATED
#define OPERATION_ON_TWO(name, instruction)                              \
    __device__ __forceinline__ Two name(Two a, Two b) {                  \
        return {name(a.first, b.first), name(a.second, b.second)};       \
    }
__device__ __forceinline__ Two fused(Two a, Two b, Two c) {
    return {fused(a.first, b.first, c.first), fused(a.second, b.second, c.second)};
}
#endif
OPERATION_ON_TWO(sum_of, "add.rn.f32x2")
OPERATION_ON_TWO(difference_of, "sub.rn.f32x2")
OPERATION_ON_TWO(product_of, "mul.rn.f32x2")
#undef OPERATION_ON_TWO

__device__ __forceinline__ Two quotient_of(Two a, Two b) {
    return {quotient_of(a.first, b.first), quotient_of(a.second, b.second)};
}
__device__ __forceinline__ Two negative_of(Two x) { return {negative_of(x.first), negative_of(x.second)}; }
__device__ __forceinline__ Two magnitude_of(Two x) { return {magnitude_of(x.first), magnitude_of(x.second)}; }

// True if squares of floats were added up without a loss that counts: none overflowed, and those
// below 2^-126, of which a float loses digits, are too small beside a sum of 2^-96.
__device__ __forceinline__ bool squares_held(double sum) { return sum >= 0x1p-96 && sum <= LARGEST; }

// A float, two or a double. An aggregate, since shared memory takes nothing that has a constructor.
template <typename F> struct Real {
    F value;
    __device__ __forceinline__ Real operator+(Real b) const { return {sum_of(value, b.value)}; }
    __device__ __forceinline__ Real operator-(Real b) const { return {difference_of(value, b.value)}; }
    __device__ __forceinline__ Real operator*(Real b) const { return {product_of(value, b.value)}; }
    __device__ __forceinline__ Real operator/(Real b) const { return {quotient_of(value, b.value)}; }
    __device__ __forceinline__ Real& operator+=(Real b) { return *this = *this + b; }
    __device__ __forceinline__ Real& operator-=(Real b) { return *this = *this - b; }
    __device__ __forceinline__ Real& operator/=(F b) { return *this = *this / Real{b}; }
};

template <typename F>
__device__ __forceinline__ Real<F> fused(Real<F> a, Real<F> b, Real<F> c) {
    return {fused(a.value, b.value, c.value)};
}

__device__ __forceinline__ double exactly(Real<float> x) { return exactly(x.value); }
__device__ __forceinline__ double exactly(Real<double> x) { return x.value; }

// A sum of floats, or two sums, and of the rounding errors that were made on the way.
template <typename F> struct Compensated { F hi, lo; };
typedef Compensated<float> Single;

// Knuth's two-sum.
template <typename F> __device__ __forceinline__ Compensated<F> sum_with_error(F a, F b) {
    const F sum = sum_of(a, b), back = difference_of(sum, a);
    return {sum, sum_of(difference_of(a, difference_of(sum, back)), difference_of(b, back))};
}

// The sum with its last bit set if it is inexact (round to odd): a second rounding, to a type of at
// most 22 bits, then gives the same as one rounding of the exact sum.
__device__ __forceinline__ float to_odd(Single sum) {
    u32 bits = __float_as_uint(sum.hi);
    const u32 lost = __float_as_uint(sum.lo);
    const bool exact = lost << 1 == 0 || (bits & 0x7f800000u) == 0x7f800000u;  // or not finite
    if (exact) return sum.hi;
    if ((lost ^ bits) >> 31) bits -= 1;  // towards zero
    return __uint_as_float(bits | 1);
}
