// The four dtypes: as memory has them, and as they are computed with.
//
// Included once for each instruction set, in a namespace of its own: inline functions of one name
// would be merged into whichever the linker finds first. So nothing of the standard library that is
// a function is included here.

#pragma once

#include <cstdint>

#include "arrays.h"

#define INLINE inline __attribute__((always_inline))

namespace ISA {

struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};

// An element that may lie at any address.
#pragma pack(push, 1)
template <typename T> struct Element {
    T value;
};
#pragma pack(pop)

template <typename To, typename From> INLINE To bits_of(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same number of bits");
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }
INLINE float widen(bf16 x) { return bits_of<float>(static_cast<uint32_t>(x.bits) << 16); }

// A subnormal number is a difference of normal ones, which no processor flushes to zero.
INLINE float widen(f16 x) {
    const uint32_t size = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
    const bool is_subnormal = size < (1u << 23), is_finite = size < (31u << 23);
    const uint32_t moved = size + ((is_subnormal ? 113u : is_finite ? 112u : 224u) << 23);
    const float value = bits_of<float>(moved) - (is_subnormal ? bits_of<float>(113u << 23) : 0.0f);
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
    return bits_of<float>(bits_of<uint32_t>(value) | sign);
}

INLINE void narrow(float x, float& to) { to = x; }
INLINE void narrow(double x, double& to) { to = x; }

INLINE void narrow(float x, bf16& to) {
    const uint32_t bits = bits_of<uint32_t>(x);
    const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    to.bits = static_cast<uint16_t>((x != x ? bits | 0x400000 : rounded) >> 16);
}

INLINE void narrow(float x, f16& to) {
    const uint32_t all = bits_of<uint32_t>(x), size = all & 0x7fffffff;
    // Half of float32's places are those of float16's smallest number where 1/2 is added.
    const uint32_t subnormal = bits_of<uint32_t>(bits_of<float>(size) + 0.5f) - (126u << 23);
    const uint32_t normal = (size + ((size >> 13) & 1) - ((112u << 23) - 0xfff)) >> 13;
    const uint32_t finite = size < (113u << 23) ? subnormal : normal;
    const uint32_t beyond = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    to.bits = static_cast<uint16_t>((size < (143u << 23) ? finite : beyond) | (all >> 16 & 0x8000));
}

// Float64 to float32, where what is not exact has an odd last bit: rounded again, to a narrower
// dtype, it is what one rounding gives.
INLINE float narrow_to_odd(double x) {
    const float nearest = static_cast<float>(x);
    if (!(nearest != x) || x != x) return nearest;
    uint32_t bits = bits_of<uint32_t>(nearest);
    const double size = x < 0 ? -x : x, found = nearest < 0 ? -nearest : nearest;
    if (found > size) --bits;
    return bits_of<float>(bits | 1);
}

INLINE void narrow(double x, float& to) { to = static_cast<float>(x); }
INLINE void narrow(double x, bf16& to) { narrow(narrow_to_odd(x), to); }
INLINE void narrow(double x, f16& to) { narrow(narrow_to_odd(x), to); }

// Whether a row can be read where it lies.
INLINE bool has_no_gaps(const Axes& columns, i64 itemsize) {
    return columns.count == 0 || (columns.count == 1 && columns.at[0].stride == itemsize);
}

// Calls visit(address, k) for `count` elements from number `from` on, in C order; k counts from 0.
template <typename F> INLINE void for_each(
    char* data, const Axes& axes, i64 from, i64 count, F visit
) {
    if (axes.count == 0) {
        if (count) visit(data, 0);
        return;
    }
    i64 index[MOST_AXES];
    for (int axis = axes.count - 1; axis >= 0; --axis) {
        index[axis] = axis ? from % axes.at[axis].length : from;
        from /= axes.at[axis].length;
        data += index[axis] * axes.at[axis].stride;
    }
    const int last = axes.count - 1;
    const Axis inner = axes.at[last];
    for (i64 k = 0; k < count;) {
        const i64 rest = inner.length - index[last];
        const i64 run = rest < count - k ? rest : count - k;
        for (i64 j = 0; j < run; ++j) visit(data + j * inner.stride, k + j);
        k += run;
        data += run * inner.stride;
        index[last] += run;
        for (int axis = last; axis > 0 && index[axis] == axes.at[axis].length; --axis) {
            data += axes.at[axis - 1].stride - axes.at[axis].length * axes.at[axis].stride;
            index[axis] = 0;
            ++index[axis - 1];
        }
    }
}

// The address of a row.
INLINE char* row_of(const Array& array, i64 row) {
    const Axes& axes = array.rows;
    char* data = array.data;
    for (int axis = axes.count - 1; axis > 0; --axis) {
        data += row % axes.at[axis].length * axes.at[axis].stride;
        row /= axes.at[axis].length;
    }
    return axes.count ? data + row * axes.at[0].stride : data;
}

}  // namespace ISA
