// Exact sums for one instruction set: ISA names it, and the namespace.
//
// A chunk's terms are split without an error: adding one to a total whose last place is worth
// 2^q rounds it to a multiple of 2^q, and what is left over is exact too, and goes to the next total,
// whose places are worth less. A total of a chunk needs no more than 51 bits, so that it is a whole
// number of 2^q in float64. The first q follows from the chunk's largest term.

#include "exact_sums.h"

#include "sums.h"

namespace ISA {

constexpr i64 TERMS = 2048;  // of a chunk
constexpr int TOTAL_LANES = 16, WIDTH = VECTOR_BYTES / sizeof(double);
// Bits of a term above the last place of its total: a lane adds up TERMS / TOTAL_LANES = 2^7 of them.
constexpr int BITS = 43;
constexpr int LEAST_PLACE = -298;

typedef double Doubles __attribute__((vector_size(8 * WIDTH)));
typedef i64 Bits __attribute__((vector_size(8 * WIDTH)));
typedef float Floats __attribute__((vector_size(4 * WIDTH)));

INLINE double power_of_two(int exponent) {
    return bits_of<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

INLINE void deposit(i64 value, int place, ExactSum& sum) {
    const int bit = place - LEAST_BIT, digit = bit / DIGIT_BITS;
    const __int128 wide = static_cast<__int128>(value) << bit % DIGIT_BITS;
    sum.digits[digit] += static_cast<uint32_t>(wide);
    sum.digits[digit + 1] += static_cast<uint32_t>(wide >> 32);
    sum.digits[digit + 2] += static_cast<i64>(wide >> 64);
}

// Returns false, and has added nothing, if a term has bits below the last total's places.
template <int TOTALS, int ORDER> INLINE bool add_chunk(const float* x, i64 count, int place, ExactSum& sum) {
    constexpr int SETS = TOTAL_LANES / WIDTH;
    Doubles totals[TOTALS][SETS], start[TOTALS];
    Bits left = {};
    int places[TOTALS];
    for (int t = 0; t < TOTALS; ++t) {
        places[t] = place > LEAST_PLACE ? place : LEAST_PLACE;
        place = places[t] - BITS;
        start[t] = Doubles{} + 1.5 * power_of_two(places[t] + 52);
        for (int s = 0; s < SETS; ++s) totals[t][s] = start[t];
    }
    for (i64 j = 0; j < count; j += TOTAL_LANES)
        for (int s = 0; s < SETS; ++s) {
            Floats loaded;
            __builtin_memcpy(&loaded, x + j + s * WIDTH, sizeof loaded);
            Doubles term = __builtin_convertvector(loaded, Doubles);
            term = ORDER == 2 ? term * term : (Doubles)((Bits)term & INT64_MAX);
            for (int t = 0; t < TOTALS; ++t) {
                const Doubles total = totals[t][s] + term;
                term -= total - totals[t][s];
                totals[t][s] = total;
            }
            left |= (Bits)term;
        }
    i64 any = 0;
    for (int lane = 0; lane < WIDTH; ++lane) any |= left[lane] & INT64_MAX;
    if (any) return false;
    for (int t = 0; t < TOTALS; ++t) {
        i64 whole = 0;
        for (int s = 0; s < SETS; ++s) {
            const Doubles units = (totals[t][s] - start[t]) * power_of_two(-places[t]);
            for (int lane = 0; lane < WIDTH; ++lane) whole += static_cast<i64>(units[lane]);
        }
        deposit(whole, places[t], sum);
    }
    return true;
}

// Each term by itself, whatever the others are.
template <int ORDER> void add_each(const float* x, i64 count, ExactSum& sum) {
    for (i64 j = 0; j < count; ++j) {
        const double magnitude = __builtin_fabs(static_cast<double>(x[j]));
        const double term = ORDER == 2 ? magnitude * magnitude : magnitude;
        if (term == 0) continue;
        const i64 bits = bits_of<i64>(term);
        const int exponent = static_cast<int>(bits >> 52) - 1023 - 52;
        // Bits below the least place are 0.
        const i64 mantissa = (bits & ((1ll << 52) - 1)) | (1ll << 52);
        const int below = exponent < LEAST_PLACE ? LEAST_PLACE - exponent : 0;
        deposit(mantissa >> below, exponent + below, sum);
    }
}

template <typename T> INLINE void widen_all(const void* data, i64 from, i64 count, float* to) {
    widen_run(
        static_cast<const Element<T>*>(data) + from, count, reinterpret_cast<Element<float>*>(to)
    );
}

template <int ORDER> void add_widened(float* x, i64 count, ExactSum& sum) {
    uint32_t largest = 0;
    for (i64 j = 0; j < count; ++j) {
        const uint32_t magnitude = bits_of<uint32_t>(x[j]) & 0x7fffffffu;
        largest = magnitude > largest ? magnitude : largest;
    }
    if (largest >= 0x7f800000u) {
        largest = 0;
        for (i64 j = 0; j < count; ++j) {
            const uint32_t magnitude = bits_of<uint32_t>(x[j]) & 0x7fffffffu;
            if (magnitude >= 0x7f800000u) {
                sum.beyond += bits_of<float>(magnitude);
                x[j] = 0;
            } else if (magnitude > largest) {
                largest = magnitude;
            }
        }
    }
    if (largest == 0) return;
    const double magnitude = bits_of<float>(largest);
    const i64 bits = bits_of<i64>(ORDER == 2 ? magnitude * magnitude : magnitude);
    const int place = static_cast<int>(bits >> 52) - 1023 + 1 - BITS;
    if (add_chunk<2, ORDER>(x, count, place, sum)) return;
    if (add_chunk<4, ORDER>(x, count, place, sum)) return;
    add_each<ORDER>(x, count, sum);
}

void add_exactly(Dtype dtype, int order, const void* data, i64 count, ExactSum& sum) {
    alignas(64) float room[TERMS];
    for (i64 from = 0; from < count; from += TERMS) {
        const i64 length = count - from < TERMS ? count - from : TERMS;
        if (dtype == F16) widen_all<f16>(data, from, length, room);
        else if (dtype == BF16) widen_all<bf16>(data, from, length, room);
        else widen_all<float>(data, from, length, room);
        const i64 padded = (length + TOTAL_LANES - 1) / TOTAL_LANES * TOTAL_LANES;
        for (i64 j = length; j < padded; ++j) room[j] = 0;
        if (order == 2) add_widened<2>(room, padded, sum);
        else add_widened<1>(room, padded, sum);
    }
}

}  // namespace ISA
