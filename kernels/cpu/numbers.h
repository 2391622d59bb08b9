// Numbers of channels or of groups, in any dtype and at any strides, computed in float64.

#pragma once

#include "arrays.h"

#define ISA plain
#include "floats.h"
#undef ISA

// A number for each channel, or for each group of each sample; without data if it is absent.
struct Numbers {
    Dtype dtype = F64;
    char* data = nullptr;
    Axis inner = {1, 0};
    i64 outer = 0;  // the stride from one sample to the next

    explicit operator bool() const { return data; }
};

// Numbers that are read and written at a time.
constexpr i64 STATISTICS = 64;

struct Divided {
    i64 quotient, rest;
};

// A division takes long, and most quotients are 0.
inline Divided divided(i64 index, i64 length) {
    if (index < length) return {0, index};
    return {index / length, index % length};
}

inline char* place(const Numbers& numbers, i64 index) {
    const Divided at = divided(index, numbers.inner.length);
    return numbers.data + at.quotient * numbers.outer + at.rest * numbers.inner.stride;
}

template <typename T> double number_at(const char* from) {
    return plain::widen(reinterpret_cast<const plain::Element<T>*>(from)->value);
}

inline double number_of(Dtype dtype, const char* from) {
    return dtype == F16 ? number_at<plain::f16>(from)
        : dtype == BF16 ? number_at<plain::bf16>(from)
        : dtype == F32  ? number_at<float>(from)
                        : number_at<double>(from);
}

inline double number(const Numbers& numbers, i64 index) {
    return number_of(numbers.dtype, place(numbers, index));
}

template <typename T, typename A> void read_at(const char* from, i64 stride, i64 count, A* to) {
    const i64 item = sizeof(T);
    if (stride == item)  // vectors of them
        for (i64 k = 0; k < count; ++k) to[k] = static_cast<A>(number_at<T>(from + k * item));
    else
        for (i64 k = 0; k < count; ++k) to[k] = static_cast<A>(number_at<T>(from + k * stride));
}

template <typename T> void write_at(char* to, i64 stride, i64 count, const double* from) {
    typedef plain::Element<T> E;
    const i64 item = sizeof(T);
    if (stride == item)
        for (i64 k = 0; k < count; ++k) plain::narrow(from[k], reinterpret_cast<E*>(to)[k]);
    else
        for (i64 k = 0; k < count; ++k)
            plain::narrow(from[k], *reinterpret_cast<E*>(to + k * stride));
}

// Numbers of one sample, if they are of samples, and plain ones if not numbers.
template <typename A> void read_numbers(const Numbers& numbers, i64 first, i64 count, A* to) {
    const auto run = numbers.dtype == F16 ? read_at<plain::f16, A>
        : numbers.dtype == BF16           ? read_at<plain::bf16, A>
        : numbers.dtype == F32            ? read_at<float, A>
                                          : read_at<double, A>;
    run(place(numbers, first), numbers.inner.stride, count, to);
    for (i64 k = 0; k < count; ++k) to[k] = plain::as_number<A>(to[k]);
}

// The same the other way, rounded once; does nothing if `numbers` is absent.
inline void write_numbers(const Numbers& numbers, i64 first, i64 count, const double* from) {
    if (!numbers) return;
    const auto run = numbers.dtype == F16 ? write_at<plain::f16>
        : numbers.dtype == BF16           ? write_at<plain::bf16>
        : numbers.dtype == F32            ? write_at<float>
                                          : write_at<double>;
    run(place(numbers, first), numbers.inner.stride, count, from);
}

inline void set_number(const Numbers& numbers, i64 index, double value) {
    write_numbers(numbers, index, 1, &value);
}

// At most STATISTICS.
inline void add_numbers(const Numbers& numbers, i64 first, i64 count, double* terms) {
    double sums[STATISTICS];
    read_numbers(numbers, first, count, sums);
    for (i64 k = 0; k < count; ++k) sums[k] += terms[k];
    write_numbers(numbers, first, count, sums);
}

// Sums over rows of a width, in the first row.
inline double by_halves(double* values, i64 rows, i64 width = 1) {
    while (rows > 1) {
        const i64 half = rows / 2;
        for (i64 k = 0; k < half * width; ++k) values[k] += values[(rows - half) * width + k];
        rows -= half;
    }
    return values[0];
}
