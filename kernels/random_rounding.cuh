// Random bits by counters, and numbers that are rounded up or down by them, for GPUs and CPUs.
//
// The bits of a key and a counter n are those of the n-th number of a SplitMix64 generator whose
// state begins at the key (Steele, Lea and Flood, OOPSLA 2014; it passes BigCrush). So any part of a
// list can be computed by itself. gradkit/_numpy/at_random.py has the same in NumPy.
//
// A file that includes this defines f16, bf16, u32, u64 and INLINE.

#pragma once

// The output of SplitMix64 for a state: each bit depends on all bits of it.
INLINE u64 mixed(u64 state) {
    state = (state ^ state >> 30) * 0xbf58476d1ce4e5b9;
    state = (state ^ state >> 27) * 0x94d049bb133111eb;
    return state ^ state >> 31;
}

INLINE u32 random_bits(u64 key, u64 counter) {
    return static_cast<u32>(mixed(key + (counter + 1) * 0x9e3779b97f4a7c15) >> 32);
}

// Digits behind the leading one, the exponent of the smallest normal number as double has it,
// infinity, NaN.
template <typename T> struct Format;
template <> struct Format<f16> { static constexpr u32 DIGITS = 10, LEAST = 1009, INF = 0x7c00, NOT_A_NUMBER = 0x7e00; };
template <> struct Format<bf16> { static constexpr u32 DIGITS = 7, LEAST = 897, INF = 0x7f80, NOT_A_NUMBER = 0x7fc0; };

// A double, given by its bits, rounded to a neighbour in T. The one farther from 0 has the
// probability of the distance to the other, in units between them, rounded to a multiple of 2^-32.
template <typename T> INLINE unsigned short rounded_at_random(u64 value, u32 bits) {
    constexpr u32 DIGITS = Format<T>::DIGITS, LEAST = Format<T>::LEAST;
    const u64 size = value & ~u64{0} >> 1, one = 1;
    const u32 field = static_cast<u32>(size >> 52), exponent = field ? field : 1;
    const u64 significand = (size & ((one << 52) - 1)) | static_cast<u64>(field != 0) << 52;
    const u32 below = LEAST > exponent ? LEAST - exponent : 0, above = exponent > LEAST ? exponent - LEAST : 0;
    const u32 far = 52 - DIGITS + below, dropped = far < 95 ? far : 95, places = far < 63 ? far : 63;
    const u64 kept = significand >> places;
    const u64 share = (significand - (kept << places) + (one << (dropped - 33))) >> (dropped - 32);
    const u64 rounded = (static_cast<u64>(above) << DIGITS) + kept + (bits < share);
    const u32 finite = rounded < Format<T>::INF ? static_cast<u32>(rounded) : Format<T>::INF;
    const u32 sign = static_cast<u32>(value >> 63) << 15;
    return static_cast<unsigned short>(size > u64{0x7ff} << 52 ? Format<T>::NOT_A_NUMBER : finite | sign);
}
