// The floating-point environment that gradkit computes in.

#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <cstdint>
#else
#include <cfenv>
#endif

// C's default, for as long as this lives: numbers are rounded to the nearest, and subnormal ones count.
// XLA's threads flush those to zero, and so does every thread for which a library that was compiled
// with -ffast-math was loaded. A new thread begins with the environment of the one that starts it.
class DefaultEnvironment {
public:
    DefaultEnvironment(const DefaultEnvironment&) = delete;
    DefaultEnvironment& operator=(const DefaultEnvironment&) = delete;

#if defined(__x86_64__) || defined(_M_X64)  // C's functions take twenty times as long
    DefaultEnvironment() : callers_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
    ~DefaultEnvironment() { _mm_setcsr(callers_); }

private:
    unsigned callers_;
#elif defined(__aarch64__)
    DefaultEnvironment() {
        asm volatile("mrs %0, fpcr" : "=r"(callers_));
        set(0);
    }
    ~DefaultEnvironment() { set(callers_); }

private:
    static void set(uint64_t fpcr) { asm volatile("msr fpcr, %0" : : "r"(fpcr) : "memory"); }

    uint64_t callers_;
#else
    DefaultEnvironment() {
        std::fegetenv(&callers_);
        std::fesetenv(FE_DFL_ENV);
    }
    ~DefaultEnvironment() { std::fesetenv(&callers_); }

private:
    std::fenv_t callers_;
#endif
};
