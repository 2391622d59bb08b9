// The level of x86-64 that the processor and the operating system support: 1, 3 or 4.
//
// It asks the processor itself. Not every compiler has __builtin_cpu_supports("x86-64-v4"): ClangCL links
// nothing for it, and Zig's answer is always no.

#pragma once

#include <cpuid.h>

struct Registers {
    unsigned a, b, c, d;
};

inline Registers cpuid(unsigned leaf) {
    Registers found = {};
    __get_cpuid_count(leaf, 0, &found.a, &found.b, &found.c, &found.d);
    return found;
}

// The registers that the operating system saves when it switches threads.
inline unsigned saved_registers() {
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

inline bool has_all(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

inline int x86_64_level() {
    constexpr unsigned BASIC = bit_SSE3 | bit_SSSE3 | bit_FMA | bit_CMPXCHG16B | bit_SSE4_1 | bit_SSE4_2 |
        bit_MOVBE | bit_POPCNT | bit_OSXSAVE | bit_AVX | bit_F16C;
    constexpr unsigned AVX_2 = bit_AVX2 | bit_BMI | bit_BMI2;
    constexpr unsigned AVX_512 = bit_AVX512F | bit_AVX512DQ | bit_AVX512CD | bit_AVX512BW | bit_AVX512VL;
    constexpr unsigned YMM = 0x06, ZMM = 0xe6;

    const unsigned extended = cpuid(7).b;
    if (!has_all(cpuid(1).c, BASIC) || !has_all(extended, AVX_2) ||
        !has_all(cpuid(0x80000001).c, bit_LZCNT) || !has_all(saved_registers(), YMM))
        return 1;
    return has_all(extended, AVX_512) && has_all(saved_registers(), ZMM) ? 4 : 3;
}
