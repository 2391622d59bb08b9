// The mean and the variance of elements that are read once.

#pragma once

#include "rows.cuh"

// Moves a mean, and keeps in `low` what rounding leaves out.
__device__ __forceinline__ void move_mean(double by, double& mean, double& low) {
    const Compensated<double> moved = sum_with_error(mean, by);
    mean = moved.hi;
    low += moved.lo;
}

// Of some elements: their number, their mean as a sum of two, and the sum of the squares of their distances from it.
struct Moments {
    double count, mean, low, squares;

    // The moments of these elements and others (Chan, Golub and LeVeque).
    __device__ __forceinline__ Moments& operator+=(const Moments& others) {
        if (count == 0) return *this = others;
        const double before = count;
        count += others.count;
        const double share = others.count / count, distance = others.mean - mean + (others.low - low);
        squares += others.squares + product_of(product_of(distance, product_of(before, share)), distance);
        if (fabs(distance) <= LARGEST) {
            move_mean(product_of(distance, share), mean, low);
        } else {  // of float64 elements it may overflow although they and their mean are finite
            mean = sum_of(product_of(1 - share, mean), product_of(share, others.mean));
            low = product_of(0, mean);
        }
        return *this;
    }

    // Biased; 0 of no elements.
    __device__ __forceinline__ double variance() const { return count == 0 || squares < 0 ? 0 : squares / count; }
};

// Of one element; NaN of an infinite one.
__device__ __forceinline__ Moments moments_of(double x) {
    const double lost = product_of(0, x);
    return {1, x, lost, lost};
}

__device__ __forceinline__ Moments from_lane(const Moments& x, int mask) {
    return {
        from_lane(x.count, mask), from_lane(x.mean, mask), from_lane(x.low, mask), from_lane(x.squares, mask)
    };
}

// Writes the mean, in two numbers, and 1 / std of statistic `k` of `count`; and both rounded.
template <typename T>
__device__ __forceinline__ void write_statistics(
    const Moments& of, i64 k, i64 count, double eps, double* exact, T* mean, T* inv_std
) {
    const double factor = 1 / sqrt(of.variance() + eps);
    exact[k] = of.mean;
    exact[count + k] = of.low;
    exact[2 * count + k] = factor;
    mean[k] = narrow<T>(of.mean + of.low);
    inv_std[k] = narrow<T>(factor);
}

// The bits in which two registers' shares of packs differ; of float64, whose squares keep their digits, none.
template <typename W> __device__ __forceinline__ u32 difference_of_bits(W a, W b) {
    if constexpr (sizeof(W) == 4) return __builtin_bit_cast(u32, a) ^ __builtin_bit_cast(u32, b);
    if constexpr (sizeof(W) == 2) return __builtin_bit_cast(unsigned short, a) ^ __builtin_bit_cast(unsigned short, b);
    return 0;
}

// The packs of a stretch, a multiple of AT_ONCE. The first has AT_ONCE, since its centre may be far off.
#define STRETCH 16

// Packs of P elements, each of whose elements k is one of channel k % N, are summed in the accumulation dtype, a
// stretch at a time: about a centre, which is the mean of all before, rounded, or of the first few. Then what
// squares lose is little beside their sum. Each stretch joins in double, of which many GPUs have little.
template <typename T, int P, int N> struct Reading {
    typedef typename Wide<T>::type A;
    typedef Raw<T, P> Pack;

    double count, mean[N], low[N], squares[N];
    A centre[N], part[2][N];
    Pack first;              // of N == 1 the first element, everywhere
    u32 apart[Pack::WORDS];  // has a bit set if an element was not the first of its channel

    __device__ __forceinline__ static A one_in(int number) { return A{1} / A{static_cast<decltype(A::value)>(number)}; }

    // Begins with some packs, the first of them `x`; `distances`: of `number` elements of each channel from its
    // first one, whose mean is near enough to that of all.
    __device__ __forceinline__ void begin(const Pack& x, const A (&distances)[N], int number) {
        const A share = one_in(number);
#pragma unroll
        for (int k = 0; k < P; ++k) first.put(k, x.at(k % N));
#pragma unroll
        for (int k = 0; k < N; ++k) {
            centre[k] = widen(x.at(k)) + distances[k] * share;
            mean[k] = exactly(centre[k]);
        }
    }

    // The same with packs of one channel.
    __device__ __forceinline__ void begin(const Pack& x) {
        A distances[1] = {};
#pragma unroll
        for (int k = 1; k < P; ++k) distances[0] += widen(x.at(k)) - widen(x.at(0));
        begin(x, distances, P);
    }

    __device__ __forceinline__ void add(const Pack& x) {
        A own[2][N];
#pragma unroll
        for (int i = 0; i < Pack::WORDS; ++i) apart[i] |= difference_of_bits(x.word[i], first.word[i]);
#pragma unroll
        for (int k = 0; k < P; ++k) {
            const A distance = widen(x.at(k)) - centre[k % N];
            A (&sum)[N] = own[0], (&square)[N] = own[1];
            sum[k % N] = k < N ? distance : sum[k % N] + distance;
            square[k % N] = k < N ? distance * distance : fused(distance, distance, square[k % N]);
        }
#pragma unroll
        for (int k = 0; k < N; ++k) {
            part[0][k] += own[0][k];
            part[1][k] += own[1][k];
        }
    }

    // Ends a stretch of `number` elements of each channel, and begins the next.
    __device__ __forceinline__ void end_stretch(int number) {
        const double before = count;
        count += number;
        const double share = number / count, weight = before * share, each = exactly(one_in(number));
#pragma unroll
        for (int k = 0; k < N; ++k) {
            const double sum = exactly(part[0][k]), own = product_of(sum, each);
            const double distance = exactly(centre[k]) - mean[k] - low[k] + own;
            squares[k] += fused(-sum, own, exactly(part[1][k])) + product_of(product_of(distance, weight), distance);
            if (sizeof(A) == 8) move_mean(product_of(distance, share), mean[k], low[k]);
            else mean[k] = fused(distance, share, mean[k]);
            centre[k] = narrow<A>(mean[k]);
            part[0][k] = part[1][k] = {0};
        }
    }

    __device__ __forceinline__ Moments of(int k) const { return {count, mean[k], low[k], squares[k]}; }

    // True if no sum overflowed, and no square lost what counts.
    __device__ __forceinline__ bool exact_enough() const {
        bool exact = true;
#pragma unroll
        for (int k = 0; k < N; ++k) exact = exact && held(k) && fabs(mean[k]) <= LARGEST;
        return exact;
    }

    __device__ __forceinline__ bool held(int k) const {
        if (sizeof(A) == 8) return squares[k] == squares[k];
        u32 differs = 0;
#pragma unroll
        for (int i = k; i < P; i += N) {
            const u32 word = apart[i / Pack::PER_WORD];
            differs |= Pack::PER_WORD == 2 ? word >> 16 * (i % 2) & 0xffffu : word;
        }
        return differs == 0 || squares_held(squares[k]);
    }
};
