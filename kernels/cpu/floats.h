// The four dtypes: as memory has them, and as they are computed with.
//
// Included once for each instruction set, in a namespace of its own: inline functions of one name
// would be merged into whichever the linker finds first. So nothing of the standard library that is
// a function is included here.

#pragma once

#include <cstdint>

#include "arrays.h"

#define INLINE inline __attribute__((always_inline))
// For lambdas.
#define INLINED __attribute__((always_inline))
// Loops whose arrays may be one array, element by element, and do not overlap otherwise.
#define INDEPENDENT _Pragma("GCC ivdep")

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

// These functions take a number, or a vector F of numbers, whose bits are U.

// A subnormal number is a difference of normal ones, which no processor flushes to zero.
template <typename F, typename U> INLINE F widen_f16(U bits) {
    const U size = (bits & 0x7fff) << 13;
    const auto is_subnormal = size < (1u << 23), is_finite = size < (31u << 23);
    const U more = is_subnormal ? U{} + 113 : is_finite ? U{} + 112 : U{} + 224;
    const F excess = is_subnormal ? F{} + bits_of<float>(113u << 23) : F{};
    const F value = bits_of<F>(size + (more << 23)) - excess;
    return bits_of<F>(bits_of<U>(value) | (bits & 0x8000) << 16);
}

// The upper half of the bits is the result, of a NaN only if it is quiet and its lower half is zero, as
// is what arithmetic makes of such NaNs.
template <typename F, typename U> INLINE U round_to_upper_half(F x) {
    const U bits = bits_of<U>(x);
    return bits + 0x7fff + ((bits >> 16) & 1);
}

// A NaN becomes the plain one, which that may meet.
template <typename N, typename F> INLINE N as_number(F x) {
    return static_cast<N>(x == x ? x : static_cast<F>(__builtin_nan("")));
}

template <typename F, typename U> INLINE U narrow_to_bf16(F x) {
    return x != x ? bits_of<U>(x) | 0x400000 : round_to_upper_half<F, U>(x);
}

template <typename F, typename U> INLINE U narrow_to_f16(F x) {
    const U all = bits_of<U>(x), size = all & 0x7fffffff;
    // Half of float32's places are those of float16's smallest number where 1/2 is added.
    const U subnormal = bits_of<U>(bits_of<F>(size) + 0.5f) - (126u << 23);
    const U normal = (size + ((size >> 13) & 1) - ((112u << 23) - 0xfff)) >> 13;
    const U finite = size < (113u << 23) ? subnormal : normal;
    const U beyond = size > 0x7f800000u ? U{} + 0x7e00 : U{} + 0x7c00;
    return (size < (143u << 23) ? finite : beyond) | (all >> 16 & 0x8000);
}

INLINE float widen(f16 x) { return widen_f16<float, uint32_t>(x.bits); }

// True if float32 had room for sums of distances and of their squares: a mean distance of few
// deviations, and a variance of middling size.
INLINE bool had_room(double distance, double variance) {
    return 0x1p-80 < variance && variance < 0x1p100 && distance * distance < 4 * variance;
}

INLINE void narrow(float x, float& to) { to = x; }
INLINE void narrow(double x, double& to) { to = x; }
INLINE void narrow(float x, double& to) { to = x; }

INLINE void narrow(float x, bf16& to) {
    to.bits = static_cast<uint16_t>(narrow_to_bf16<float, uint32_t>(x) >> 16);
}
INLINE void narrow(float x, f16& to) {
    to.bits = static_cast<uint16_t>(narrow_to_f16<float, uint32_t>(x));
}

// Float64 to float32, with an odd last bit if it is not exact: rounded again, to float16, it is what
// one rounding gives. Subnormal numbers of float32 are 0 there.
INLINE float narrow_to_odd(double x) {
    const uint64_t bits = bits_of<uint64_t>(x), dropped = (uint64_t{1} << 29) - 1;
    const uint64_t odd = (bits & dropped) != 0 ? dropped + 1 : 0;
    return static_cast<float>(bits_of<double>((bits & ~dropped) | odd));
}

// Float64 rounded to the numbers of bfloat16.
INLINE float round_to_bf16(double x) {
    constexpr int DROPPED = 45;
    constexpr uint64_t HALF = uint64_t{1} << (DROPPED - 1), SIGN = uint64_t{1} << 63;
    // Added to a number below the least normal one, it leaves no places below those of bfloat16.
    constexpr double ROUNDER = 0x1.8p-81;
    const uint64_t bits = bits_of<uint64_t>(x);
    const uint64_t rounded = (bits + (HALF - 1) + (bits >> DROPPED & 1)) & ~(2 * HALF - 1);
    const double small = (x + ROUNDER) - ROUNDER, normal = x != x ? x : bits_of<double>(rounded);
    const uint64_t signed_small = bits_of<uint64_t>(small) | (bits & SIGN);
    const bool is_small = bits_of<double>(bits & ~SIGN) < 0x1p-126;
    return static_cast<float>(is_small ? bits_of<double>(signed_small) : normal);
}

INLINE void narrow(double x, float& to) { to = static_cast<float>(x); }
INLINE void narrow(double x, bf16& to) {
    to.bits = static_cast<uint16_t>(bits_of<uint32_t>(round_to_bf16(x)) >> 16);
}
INLINE void narrow(double x, f16& to) { narrow(narrow_to_odd(x), to); }

// An element may lie where no reference to its value can.
template <typename A, typename T> INLINE void narrow(A x, Element<T>& to) {
    T value;
    narrow(x, value);
    to.value = value;
}

// Compilers convert float16 by the processor's instruction only if told to. The bits are those of `widen`
// and `narrow`, but for a NaN's payload; subnormal numbers stay whatever the caller flushes.
#ifdef __F16C__
#define CONVERTS_F16 1
typedef short EightHalves __attribute__((vector_size(16)));
#ifdef __clang__
typedef _Float16 EightFloat16 __attribute__((vector_size(16)));
typedef float EightFloats __attribute__((vector_size(32)));
#define TO_EIGHT_FLOATS(halves) __builtin_convertvector(bits_of<EightFloat16>(halves), EightFloats)
#else
#define TO_EIGHT_FLOATS(halves) __builtin_ia32_vcvtph2ps256(halves)
#endif
#ifdef __AVX512F__
constexpr i64 AT_ONCE = 16;
#define TO_FLOATS(halves) __builtin_ia32_vcvtph2ps512_mask(halves, FloatsAtOnce{}, -1, 4)
#define TO_HALVES(floats) __builtin_ia32_vcvtps2ph512_mask(floats, 0, HalvesAtOnce{}, -1)
#else
constexpr i64 AT_ONCE = 8;
#define TO_FLOATS TO_EIGHT_FLOATS
#define TO_HALVES(floats) __builtin_ia32_vcvtps2ph256(floats, 0)
#endif
typedef short HalvesAtOnce __attribute__((vector_size(2 * AT_ONCE)));
typedef float FloatsAtOnce __attribute__((vector_size(4 * AT_ONCE)));
#else
#define CONVERTS_F16 0
#endif

template <typename T> constexpr bool IS_CONVERTED = false;
template <> inline constexpr bool IS_CONVERTED<f16> = CONVERTS_F16;
// Elements that are converted at a time.
constexpr i64 CONVERTED = 1024;

// Elements that lie side by side, in the dtype of the computation.
template <typename T, typename A> INLINE void widen_run(
    const Element<T>* from, i64 count, Element<A>* to
) {
    i64 j = 0;
#if CONVERTS_F16
    if constexpr (IS_CONVERTED<T> && sizeof(A) == sizeof(float))
        for (; j + AT_ONCE <= count; j += AT_ONCE) {
            HalvesAtOnce halves;
            __builtin_memcpy(&halves, from + j, sizeof halves);
            const FloatsAtOnce floats = TO_FLOATS(halves);
            __builtin_memcpy(to + j, &floats, sizeof floats);
        }
#endif
    INDEPENDENT
    for (; j < count; ++j) to[j].value = widen(from[j].value);
}

// The same the other way.
template <typename T, typename A> INLINE void narrow_run(
    const Element<A>* from, i64 count, Element<T>* to
) {
    i64 j = 0;
#if CONVERTS_F16
    if constexpr (IS_CONVERTED<T> && sizeof(A) == sizeof(float))
        for (; j + AT_ONCE <= count; j += AT_ONCE) {
            FloatsAtOnce floats;
            __builtin_memcpy(&floats, from + j, sizeof floats);
            const HalvesAtOnce halves = TO_HALVES(floats);
            __builtin_memcpy(to + j, &halves, sizeof halves);
        }
#endif
    INDEPENDENT
    for (; j < count; ++j) narrow(from[j].value, to[j]);
}

INLINE float for_f16(float x) { return x; }
INLINE float for_f16(double x) { return narrow_to_odd(x); }

// Writes value(j) to elements that lie side by side.
template <typename T, typename F> INLINE void write_run(i64 count, Element<T>* to, F value) {
    if constexpr (IS_CONVERTED<T>) {
        Element<float> block[CONVERTED];
        for (i64 at = 0; at < count; at += CONVERTED) {
            const i64 length = at + CONVERTED < count ? CONVERTED : count - at;
            INDEPENDENT
            for (i64 j = 0; j < length; ++j) block[j].value = for_f16(value(at + j));
            narrow_run(block, length, to + at);
        }
    } else {
        INDEPENDENT
        for (i64 j = 0; j < count; ++j) narrow(value(j), to[j]);
    }
}

// Calls visit(from, count) for parts of a run that `Widened` can hold.
template <typename T, typename F> INLINE void for_blocks(i64 count, F visit) {
    const i64 step = IS_CONVERTED<T> ? CONVERTED : count;
    for (i64 from = 0; from < count; from += step)
        visit(from, from + step < count ? step : count - from);
}

// Elements that lie side by side, as numbers; at most a block of what is converted beforehand.
template <typename T, bool = IS_CONVERTED<T>> class Widened {
public:
    INLINE Widened(const Element<T>* from, i64) : from_(from) {}
    INLINE auto operator[](i64 j) const { return widen(from_[j].value); }

private:
    const Element<T>* from_;
};

template <typename T> class Widened<T, true> {
public:
    INLINE Widened(const Element<T>* from, i64 count) { widen_run(from, count, held_); }
    INLINE float operator[](i64 j) const { return held_[j].value; }

private:
    Element<float> held_[CONVERTED];
};

INLINE i64 at_most(i64 value, i64 limit) { return value < limit ? value : limit; }
INLINE i64 at_least(i64 value, i64 limit) { return value > limit ? value : limit; }
INLINE i64 magnitude(i64 stride) { return stride < 0 ? -stride : stride; }

// True if a row can be read where it lies.
INLINE bool has_no_gaps(const Axes& columns, i64 itemsize) {
    return columns.count == 0 || (columns.count == 1 && columns.at[0].stride == itemsize);
}

// The address of an element, by its number in C order.
INLINE char* address_of(char* data, const Axes& axes, i64 number) {
    for (int axis = axes.count - 1; axis > 0; --axis) {
        data += number % axes.at[axis].length * axes.at[axis].stride;
        number /= axes.at[axis].length;
    }
    return axes.count ? data + number * axes.at[0].stride : data;
}

// Calls visit(address, k, run, rows) for `count` elements from number `from` on, in C order: `run` of them along the
// last axis, from number k on, and in as many rows, up to `most`, if those are all that a row has.
template <typename F> INLINE void for_runs(
    char* data, const Axes& axes, i64 from, i64 count, i64 most, F visit
) {
    if (count == 0) return;  // an axis may be of no length
    if (axes.count == 0) return visit(data, 0, 1, 1);
    i64 index[MOST_AXES];
    for (int axis = axes.count - 1; axis >= 0; --axis) {
        index[axis] = axis ? from % axes.at[axis].length : from;
        from /= axes.at[axis].length;
        data += index[axis] * axes.at[axis].stride;
    }
    const int last = axes.count - 1;
    const Axis inner = axes.at[last];
    for (i64 k = 0;;) {
        const i64 run = at_most(inner.length - index[last], count - k);
        i64 rows = 1;
        if (most > 1 && last > 0 && run == inner.length)
            rows = at_most(at_most(axes.at[last - 1].length - index[last - 1], (count - k) / run), most);
        visit(data, k, run, rows);
        k += run * rows;
        if (k == count) return;
        data += rows * axes.at[last - 1].stride - index[last] * inner.stride;
        index[last] = 0;
        index[last - 1] += rows;
        for (int axis = last - 1; axis > 0 && index[axis] == axes.at[axis].length; --axis) {
            data += axes.at[axis - 1].stride - axes.at[axis].length * axes.at[axis].stride;
            index[axis] = 0;
            ++index[axis - 1];
        }
    }
}

// Calls visit(address, k) for each of those elements.
template <typename F> INLINE void for_each(
    char* data, const Axes& axes, i64 from, i64 count, F visit
) {
    const i64 stride = axes.count ? axes.at[axes.count - 1].stride : 0;
    for_runs(data, axes, from, count, 1, [=](char* at, i64 k, i64 run, i64) INLINED {
        for (i64 j = 0; j < run; ++j) visit(at + j * stride, k + j);
    });
}

// Parts of memory that lie apart, or are one. A processor may have an instruction for long copies which takes
// ten times as long if addresses differ by 16 bytes but for whole pages, and libraries use it from here on.
INLINE void copy_bytes(char* to, const char* from, i64 count) {
    constexpr i64 SHORT = 1 << 11, FEW = 16, MANY = 128;
    for (; count > SHORT; count -= SHORT, to += SHORT, from += SHORT) __builtin_memcpy(to, from, SHORT);
    if (count < FEW || count > MANY) {
        __builtin_memcpy(to, from, count);
        return;
    }
    for (i64 at = 0; at < count - FEW; at += FEW) __builtin_memcpy(to + at, from + at, FEW);
    __builtin_memcpy(to + count - FEW, from + count - FEW, FEW);  // over some of the last ones
}

// Copies elements of BYTES bytes, `count` from number `from` on in C order, between memory at strides and
// memory without gaps. Neighbours along the axis before the last are read while they are in the cache.
template <bool GATHER, int BYTES> void copy_items(
    char* data, const Axes& axes, i64 from, i64 count, char* packed
) {
    constexpr i64 TILE = 16;
    const int last = axes.count - 1;
    const i64 stride = last < 0 ? BYTES : axes.at[last].stride;
    const i64 across = last < 1 ? stride : axes.at[last - 1].stride;
    const auto copy = [](char* own, char* other, i64 bytes) INLINED {
        copy_bytes(GATHER ? other : own, GATHER ? own : other, bytes);
    };
    for_runs(data, axes, from, count, magnitude(across) < magnitude(stride) ? TILE : 1,
             [=](char* own, i64 k, i64 run, i64 rows) INLINED {
        char* const to = packed + k * BYTES;
        if (rows == 1 && stride == BYTES) return copy(own, to, run * BYTES);
        if (rows == 1) {
#pragma GCC unroll 8
            for (i64 j = 0; j < run; ++j) copy(own + j * stride, to + j * BYTES, BYTES);
            return;
        }
        char tile[TILE * TILE * BYTES];
        const auto turn = [&](i64 first, i64 columns, i64 rows) INLINED {
            for (i64 j = 0; j < columns; ++j) {
                char* const at = own + (first + j) * stride;
                __builtin_prefetch(at + TILE * stride);  // of the next tile
#pragma GCC unroll 16
                for (i64 r = 0; r < rows; ++r) copy(at + r * across, tile + (r * TILE + j) * BYTES, BYTES);
            }
        };
        const auto copy_tile = [&](i64 first, i64 columns, i64 rows) INLINED {
            if (GATHER) turn(first, columns, rows);
            for (i64 r = 0; r < rows; ++r)
                copy(tile + r * TILE * BYTES, to + (r * run + first) * BYTES, columns * BYTES);
            if (!GATHER) turn(first, columns, rows);
        };
        i64 first = 0;
        if (rows == TILE)  // loops that need not count
            for (; first + TILE <= run; first += TILE) copy_tile(first, TILE, TILE);
        for (; first < run; first += TILE) copy_tile(first, at_most(TILE, run - first), rows);
    });
}

template <bool GATHER> INLINE void copy_elements(
    i64 bytes, char* data, const Axes& axes, i64 from, i64 count, char* packed
) {
    const auto run = bytes == 2 ? copy_items<GATHER, 2> : bytes == 4 ? copy_items<GATHER, 4> : copy_items<GATHER, 8>;
    run(data, axes, from, count, packed);
}

// The address of a row.
INLINE char* row_of(const Array& array, i64 row) {
    return address_of(array.data, array.rows, row);
}

}  // namespace ISA
