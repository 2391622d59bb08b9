// Registers of a thread of a row's gradient: one rule for all ways to hold a row.
//
// A thread has 128 registers, or 64 if two blocks are to be resident. Some it always needs: for every
// pack of its columns addresses, conditions and what is being computed. The others hold, in this order and
// as long as it fits: the row's packs, the sums of its columns, ds, scale, the next row, a bias. What is not
// kept is read when it is needed: scale and bias from the cache, for each row.
//
// The estimates are read off the code that ptxas makes for sm_80 to sm_120.

#pragma once

#include "row_starts.cuh"

#ifndef ODD
#define ODD 0
#endif

// That a block's threads have each, if so many blocks are resident.
constexpr int registers(int threads, int blocks) { return 65536 / (threads * blocks) & -8; }

// The compute capability: from 10.0 on ptxas makes more use of registers, and before 8.0 less.
#ifdef __CUDA_ARCH__
constexpr int CAPABILITY = __CUDA_ARCH__;
#else
constexpr int CAPABILITY = 900;
#endif
constexpr bool SINCE_10 = CAPABILITY >= 1000, BEFORE_8 = CAPABILITY < 800;

// That a thread needs besides what it keeps, for so many packs: more for addresses at strides, of single elements if
// rows are odd, for sums of 16 bits with an offset, and for what lies in two packs of memory.
constexpr int needed(int packs) {
    const bool offset = FURTHER && SINCE_10 && sizeof(DATA_T) == 2;
    return 27 + 4 * packs + (STRIDED ? 14 : offset ? 8 : 0) + (ODD ? STRIDED && SINCE_10 ? 24 : 4 : 0);
}

// The registers that are left.
struct Room {
    int left;
    // True if so many more fit: then they are taken.
    constexpr bool keeps(int words) {
        if (words > left) return false;
        left -= words;
        return true;
    }
};
