// The arithmetic of p-norms: one struct for each kind of p.
//
// `include` adds the elements of a chunk, `combine` joins two partial results, `divide` makes a sum
// a mean, and `root` gives the norm of a result divided by its scale. Sums accumulate the rounding
// errors of their additions (two-sum), so their error does not grow with the number of elements. No
// intermediate overflows or underflows. NaN stays NaN.
//
// f16, bf16 and f32 are summed in pairs of floats over a few batches of a lane's loads and, for the
// rest of a chunk, over the lanes of a warp; then in double, because many GPUs have few
// double-precision units. The relative error of a norm is below 2^-40. f64 is summed in double,
// within two units in the last place.

#pragma once

#include "tensor_list.cuh"

// Represents (hi + lo) * scale^p. A scale of 0 means that all elements so far were zero.
struct Part { double hi, lo, scale; };

// Adds x to hi + lo. The only error is the rounding of lo (Knuth's two-sum). The intrinsics
// prevent contraction into multiply-adds: two-sum needs every operation to round.
__device__ __forceinline__ void add(Part& part, double x) {
    const double sum = __dadd_rn(part.hi, x);
    const double back = __dsub_rn(sum, part.hi);
    const double lost = __dadd_rn(__dsub_rn(part.hi, __dsub_rn(sum, back)), __dsub_rn(x, back));
    part.lo = __dadd_rn(part.lo, lost);
    part.hi = sum;
}

// The sum that a Part holds. Once hi is infinite or NaN, lo is NaN and is ignored.
__device__ __forceinline__ double total(const Part& part) {
    return fabs(part.hi) <= LARGEST ? part.hi + part.lo : part.hi;
}

// Two Parts joined on the larger scale.
template <typename Order>
__device__ __forceinline__ void combine_scaled(Part& into, Part other, double p) {
    if (other.scale > into.scale) {
        const Part smaller = into;
        into = other;
        other = smaller;
    }
    if (other.hi == 0) return;  // as that of lanes which have nothing: two divisions less
    if (other.scale < into.scale) Order::shrink(other, other.scale / into.scale, p);
    add(into, other.hi);
    into.lo = __dadd_rn(into.lo, other.lo);
}

template <typename F> __device__ __forceinline__ Compensated<F> operator+(Compensated<F> a, Compensated<F> b) {
    const Compensated<F> sum = sum_with_error(a.hi, b.hi);
    return {sum.hi, sum_of(sum.lo, sum_of(a.lo, b.lo))};
}

// The same number with a lo of at most half a unit in the last place of hi.
__device__ __forceinline__ Single normalized(Single sum) {
    const float hi = sum_of(sum.hi, sum.lo);
    return {hi, sum_of(difference_of(sum.hi, hi), sum.lo)};
}

// A lane's sums of a chunk; `waiting` are sums of 2 * TURNS turns at most.
struct Share { Part part; Single waiting; };

// No sum above this waits: those of all lanes of a warp then add up without overflow.
#define LARGEST_WAITING 0x1p118f

// In plain double: no memory holds chunks so long that this many roundings would count.
__device__ __forceinline__ void add_waiting(Share& share) {
    const double sum = __dadd_rn(exactly(share.waiting.hi), exactly(share.waiting.lo));
    share.part.hi = __dadd_rn(share.part.hi, sum);
    share.waiting = {0, 0};
}

// The sum of N terms, which it changes: a tree, whose depth bounds the error. EXACT terms have no errors yet.
template <bool EXACT, typename F, int N>
__device__ __forceinline__ Compensated<F> sum_of_all(Compensated<F> (&terms)[N]) {
#pragma unroll
    for (int width = N / 2; width > 0; width /= 2)
#pragma unroll
        for (int i = 0; i < width; ++i) {
            const Compensated<F> a = terms[i], b = terms[i + width];
            terms[i] = EXACT && width == N / 2 ? sum_with_error(a.hi, b.hi) : a + b;
        }
    return terms[0];
}

// Code for several dtypes (list_walk.cuh) has no registers for two packs side by side.
#ifdef SEVERAL_DTYPES
constexpr bool PACKS_ABREAST = false;
#else
constexpr bool PACKS_ABREAST = TWO_AT_ONCE;
#endif

// The sum of Order::single of the elements of all packs, pack by pack. Two packs of 16-bit elements, which wait for
// instructions and not for memory, are added up side by side where one instruction does both.
template <typename Order, typename T, int N, int B>
__device__ __forceinline__ Single sum_in_single(const Held<T, T, N> (&packs)[B]) {
    constexpr bool EXACT = Order::template is_exact<T>();
    Single sums[B];
    if constexpr (PACKS_ABREAST && sizeof(T) == 2 && B % 2 == 0) {
#pragma unroll
        for (int b = 0; b < B; b += 2) {
            const auto value = [&](int k, int i) { return widen(packs[b + k].source.at(i)).value; };
            Compensated<Two> terms[N];
#pragma unroll
            for (int i = 0; i < N; ++i) terms[i] = Order::template single<T>(Two{value(0, i), value(1, i)});
            const Compensated<Two> sum = sum_of_all<EXACT>(terms);
            sums[b] = {sum.hi.first, sum.lo.first};
            sums[b + 1] = {sum.hi.second, sum.lo.second};
        }
    } else {
#pragma unroll
        for (int b = 0; b < B; ++b) {
            Single terms[N];
#pragma unroll
            for (int i = 0; i < N; ++i) terms[i] = Order::template single<T>(widen(packs[b].source.at(i)).value);
            sums[b] = sum_of_all<EXACT>(terms);
        }
    }
    Single sum = sums[0];
#pragma unroll
    for (int b = 1; b < B; ++b) sum = sum + sums[b];
    return sum;
}

// The sum of Order::term of all elements, each exact in double: rare, so in few registers.
template <typename Order, typename T, int N, int B>
__device__ __forceinline__ double sum_in_double(const Held<T, T, N> (&packs)[B]) {
    double sum = 0;
#pragma unroll
    for (int b = 0; b < B; ++b)
#pragma unroll
        for (int i = 0; i < N; ++i) sum = __dadd_rn(sum, Order::term(packs[b].source.at(i)));
    return sum;
}

template <typename T, int N, int B> __device__ __forceinline__ bool all_zero(const Held<T, T, N> (&packs)[B]) {
    u32 magnitudes = 0;
#pragma unroll
    for (int b = 0; b < B; ++b)
#pragma unroll
        for (int i = 0; i < N; ++i) magnitudes |= __float_as_uint(widen(packs[b].source.at(i)).value) << 1;
    return magnitudes == 0;
}

// Adds B packs in pairs of floats; in double if that would overflow or lose digits.
template <typename Order, typename T, int N, int B>
__device__ __forceinline__ void add_packs(Share& share, const Held<T, T, N> (&packs)[B]) {
    const Single sum = sum_in_single<Order>(packs);
    if (Order::holds(sum.hi)) {
        share.waiting = normalized(share.waiting + sum);
    } else if (sum.hi != 0 || !all_zero(packs)) {  // no work for a gradient of zeros
        share.part.hi = __dadd_rn(share.part.hi, sum_in_double<Order>(packs));
    }
}

// Adds B packs: each f64 by itself, for it may need a scale.
template <typename Order, typename T, int N, int B>
__device__ __forceinline__ void include_packs(Share& share, const Held<T, T, N> (&packs)[B], double p) {
    if constexpr (sizeof(T) == 8) {
#pragma unroll
        for (int b = 0; b < B; ++b)
#pragma unroll
            for (int i = 0; i < N; ++i) Order::include_double(share.part, fabs(packs[b].source.at(i)), p);
    } else {
        add_packs<Order>(share, packs);
        share.part.scale = 1;
    }
}

// The operation of all orders but the largest.
struct Addition {
    __device__ static __forceinline__ void divide(Part& part, double count) {
        part.hi /= count;
        part.lo /= count;
    }
};

// p = 1. A double holds sums of f32 and narrower. A large f64 is scaled by a power of two, since a
// norm that overflows may be that of numbers which are to be multiplied by a small one.
struct Sum : Addition {
    static constexpr int BYTES = 16, BATCH = 4;
    static constexpr bool WAITS = true;  // sums of floats do, in a Share
    template <typename T> __device__ static __forceinline__ double term(T x) {
        return fabs(to_double(x));
    }
    template <typename T> __device__ static __forceinline__ constexpr bool is_exact() { return true; }
    template <typename T, typename F> __device__ static __forceinline__ Compensated<F> single(F x) {
        return {magnitude_of(x), {}};
    }
    __device__ static __forceinline__ bool holds(float sum) { return sum <= LARGEST_WAITING; }
    template <typename T, int N, int B>
    __device__ static __forceinline__ void include(Share& share, const Held<T, T, N> (&packs)[B], double p) {
        include_packs<Sum>(share, packs, p);
    }
    __device__ static __forceinline__ void include_double(Part& part, double x, double p) {
        const double scale = x > 0x1p900 ? 0x1p100 : 1;  // NaN: 1
        if (scale > part.scale) {
            shrink(part, part.scale / scale, p);
            part.scale = scale;
        }
        add(part, part.scale > 1 ? x * 0x1p-100 : x);
    }
    __device__ static __forceinline__ void shrink(Part& part, double ratio, double) {
        part.hi *= ratio;
        part.lo *= ratio;
    }
    __device__ static __forceinline__ void combine(Part& into, const Part& other, double p) {
        combine_scaled<Sum>(into, other, p);
    }
    __device__ static __forceinline__ double root(const Part& part, double) { return total(part); }
};

// p = 2. Squares of f32 and narrower are exact in double. An f64 is scaled by a power of two if
// its square could overflow or underflow (the idea of Blue's algorithm).
struct SumOfSquares : Addition {
    static constexpr int BYTES = 16, BATCH = 4;
    static constexpr bool WAITS = true;
    template <typename T> __device__ static __forceinline__ double term(T x) {
        return to_double(x) * to_double(x);
    }
    // The square and what rounding took from it; squares of 16 bits are exact.
    template <typename T> __device__ static __forceinline__ constexpr bool is_exact() { return sizeof(T) == 2; }
    template <typename T, typename F> __device__ static __forceinline__ Compensated<F> single(F x) {
        const F square = product_of(x, x);
        return {square, is_exact<T>() ? F{} : fused(x, x, negative_of(square))};
    }
    // A float loses digits of squares below 2^-126. Beside a sum of 2^-96 these are too small to
    // count.
    __device__ static __forceinline__ bool holds(float sum) {
        return sum >= 0x1p-96f && sum <= LARGEST_WAITING;
    }
    template <typename T, int N, int B>
    __device__ static __forceinline__ void include(Share& share, const Held<T, T, N> (&packs)[B], double p) {
        include_packs<SumOfSquares>(share, packs, p);
    }
    __device__ static __forceinline__ void include_double(Part& part, double x, double p) {
        const double scale = x > 0x1p480 ? 0x1p600 : x < 0x1p-480 ? 0x1p-600 : 1;  // NaN: 1
        if (scale > part.scale) {
            shrink(part, part.scale / scale, p);
            part.scale = scale;
        }
        const double y = part.scale == 1 ? x : x * (part.scale > 1 ? 0x1p-600 : 0x1p600);
        add(part, __dmul_rn(y, y));
    }
    // In two steps: the square of the ratio alone would underflow.
    __device__ static __forceinline__ void shrink(Part& part, double ratio, double) {
        part.hi = part.hi * ratio * ratio;
        part.lo = part.lo * ratio * ratio;
    }
    __device__ static __forceinline__ void combine(Part& into, const Part& other, double p) {
        combine_scaled<SumOfSquares>(into, other, p);
    }
    __device__ static __forceinline__ double root(const Part& part, double) { return sqrt(total(part)); }
};

// Any other finite p: powers of magnitudes divided by the largest so far.
struct SumOfPowers : Addition {
    static constexpr int BYTES = 1, BATCH = 1;  // pow dominates the time and the code size
    static constexpr bool WAITS = false;
    template <typename T, int N, int B>
    __device__ static __forceinline__ void include(Share& share, const Held<T, T, N> (&packs)[B], double p) {
        for (int b = 0; b < B; ++b)
            for (int i = 0; i < N; ++i) include_one(share.part, fabs(to_double(packs[b].source.at(i))), p);
    }
    __device__ static __forceinline__ void include_one(Part& part, double x, double p) {
        if (x == 0) return;
        const double scale = x > LARGEST ? LARGEST : x;  // infinity divided by this is infinity
        if (scale > part.scale) {
            shrink(part, part.scale / scale, p);
            part.scale = scale;
        }
        add(part, pow(x / part.scale, p));
    }
    __device__ static __forceinline__ void shrink(Part& part, double ratio, double p) {
        const double factor = pow(ratio, p);
        part.hi *= factor;
        part.lo *= factor;
    }
    __device__ static __forceinline__ void combine(Part& into, const Part& other, double p) {
        combine_scaled<SumOfPowers>(into, other, p);
    }
    __device__ static __forceinline__ double root(const Part& part, double p) {
        return pow(total(part), 1 / p);
    }
};

// p = infinity: the largest magnitude, or NaN if there is one.
struct Largest {
    static constexpr int BYTES = 16, BATCH = 4;
    static constexpr bool WAITS = false;
    __device__ static __forceinline__ void join(Part& part, double x) {
        if (x > part.hi || x != x) part.hi = x;
        part.scale = 1;
    }
    // Bits without a sign are in the order of magnitudes, NaN above infinity.
    template <typename T, int N, int B>
    __device__ static __forceinline__ void include(Share& share, const Held<T, T, N> (&packs)[B], double) {
        if constexpr (sizeof(T) == 8) {
#pragma unroll
            for (int b = 0; b < B; ++b)
#pragma unroll
                for (int i = 0; i < N; ++i) join(share.part, fabs(packs[b].source.at(i)));
        } else {
            u32 largest = 0;
#pragma unroll
            for (int b = 0; b < B; ++b)
#pragma unroll
                for (int i = 0; i < N; ++i)
                    largest = max(largest, __float_as_uint(widen(packs[b].source.at(i)).value) & 0x7fffffffu);
            join(share.part, exactly_of_bits(largest));
        }
    }
    __device__ static __forceinline__ void combine(Part& into, const Part& other, double) {
        join(into, other.hi);
    }
    __device__ static __forceinline__ void divide(Part&, double) {}  // nothing was added up
    __device__ static __forceinline__ void shrink(Part& part, double ratio, double) { part.hi *= ratio; }
    __device__ static __forceinline__ double root(const Part& part, double) { return part.hi; }
};

// by * scale * root. In the product of the three, two may overflow or underflow where all do not.
template <typename Order> __device__ __forceinline__ double norm_of(const Part& part, double p, double by) {
    const double root = Order::root(part, p);
    if (by == 1) return part.scale * root;
    int first, second;
    const double product = frexp(part.scale, &first) * frexp(by, &second) * root;
    return ldexp(product, first + second);
}
