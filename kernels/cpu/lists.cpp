// Lists of gradients on a CPU, for one instruction set: ISA names it, and the namespace.
//
//   stats       what statistics are computed from
//   part        what a norm adds up: |x|, x^2, |x|^p, or the largest |x|
//   scale       to = from * factor
//   clamp       to = min(max(from, -limit), limit)
//   add, terms  to += scale * from, or to = scale * from
//   compensate  the same of a pair, of which the second keeps what the first drops
//   average     to = decay * to + (1 - decay) * from
//   move        running statistics, towards those of a batch
//   zero        to = 0
//   round_at_random  the same, rounded by random bits
//   adamw, sgd  steps of optimisers, of arrays of any dtypes
//
// Plain loops that a compiler makes vectors of. Bits are the same for each instruction set: sums
// have TOTAL_LANES totals, whatever a vector holds. Products and scaled sums are computed in float64
// and rounded once.

#include "lists.h"

#include "powers.h"
#include "sums.h"

namespace ISA {
typedef uint32_t u32;
typedef uint64_t u64;
#include "../random_rounding.cuh"

INLINE bool is_zero(double x) { return x == 0; }
INLINE bool is_positive(double x) { return x > 0; }
INLINE float root_of(float x) { return __builtin_sqrtf(x); }
INLINE double root_of(double x) { return __builtin_sqrt(x); }
template <typename V> INLINE V root_of(V x) {
    if constexpr (ARE_TWINS<V>) return {root_of(x.even), root_of(x.odd)};
    else
        for (int l = 0; l < LENGTH<V>; ++l) x[l] = root_of(x[l]);  // one instruction
    return x;
}
#include "../updates.cuh"
}  // namespace ISA

namespace ISA {

constexpr int TOTAL_LANES = 32;
constexpr double INFINITE = __builtin_inf(), LARGEST = 0x1.fffffffffffffp1023;

// Asks for memory before it is read: it takes longer to come than processors look ahead by themselves.
// The memory behind a long run is mostly the next one. FEW elements are asked for at a time where a
// processor would wait for more.
constexpr i64 LONG_RUN = 1 << 12, FEW = 64, AHEAD = 1 << 13;
template <typename T> INLINE void fetch_ahead(const Element<T>* from, i64 count) {
    const char* at = reinterpret_cast<const char*>(from) + AHEAD;
    for (i64 k = 0; k < count * i64{sizeof(T)}; k += LINE) __builtin_prefetch(at + k);
}

// Two arrays of float32 or more that are read at once come no sooner so, and on some processors later.
template <typename T> INLINE void fetch_halves_ahead(const Element<T>* from, i64 count) {
    if (sizeof(T) == 2) fetch_ahead(from, count);
}

// Calls visit(from, count) for parts of a run that `Widened` can hold. All but the first begin where
// a line of `to` does: what crosses lines takes twice as long.
template <typename T, typename F> INLINE void for_parts(const Element<T>* to, i64 count, F visit) {
    const i64 beyond = static_cast<i64>(reinterpret_cast<uintptr_t>(to) % LINE / sizeof(T));
    i64 from = 0, step = CONVERTED - beyond;
    for (; from < count; from += step, step = CONVERTED)
        visit(from, from + step < count ? step : count - from);
}

// The count of elements before a line begins.
template <typename T> INLINE i64 before_line(const Element<T>* at) {
    constexpr i64 item = sizeof(T);
    return -(reinterpret_cast<intptr_t>(at) / item) & (LINE / item - 1);
}

// Vectors of numbers of T, as they are computed with.
template <typename T, typename V = typename VectorOf<decltype(widen(T{}))>::type> struct Computed {
    typedef V type;
};
template <typename V> struct Computed<bf16, V> {
    typedef Twins<V> type;
};

// Writes value(j, V) to as many elements of a run from j on as a vector V has. Vectors begin where a
// line does.
template <typename T, typename F> INLINE void map_vectors(
    const Element<T>* from, Element<T>* to, i64 count, F value
) {
    typedef decltype(widen(T{})) A;
    typedef typename Computed<T>::type V;
    const i64 before = before_line(to);
    i64 j = 0;
    for (; j < before && j < count; ++j) write(value(j, A{}), to + j);
    for (; j + LENGTH<V> <= count; j += LENGTH<V>) {
        fetch_halves_ahead(from + j, LENGTH<V>);
        fetch_halves_ahead(to + j, LENGTH<V>);
        write(value(j, V{}), to + j);
    }
    for (; j < count; ++j) write(value(j, A{}), to + j);
}

template <typename T> INLINE double wide(T x) { return static_cast<double>(widen(x)); }

// The square of what is narrower than float64 is exact, so that to fuse it changes no bit.
template <typename A> INLINE double add_square(double sum, A x) {
    const double value = x;
#ifdef __FMA__
    if (sizeof(A) < 8) return __builtin_fma(value, value, sum);
#endif
    return sum + value * value;
}

// Knuth's two-sum: the only error is the rounding of lo.
INLINE void add_exactly(double& hi, double& lo, double x) {
    const double sum = hi + x, back = sum - hi;
    lo += (hi - (sum - back)) + (x - back);
    hi = sum;
}

// The sum of terms: add(sum, x) adds one. Totals take RUN terms at most before what rounding takes
// from them is kept: those of float64, whose terms are rounded, one.
template <typename T, typename F> INLINE Part sum_over(const Element<T>* x, i64 count, F add) {
    constexpr i64 RUN = (sizeof(T) == 8 ? 1 : 32) * TOTAL_LANES;
    double hi[TOTAL_LANES] = {}, lo[TOTAL_LANES] = {};
    for (i64 at = 0; at < count;) {
        const i64 length = at + RUN < count ? RUN : count - at;
        const Widened<T> source(x + at, length);
        double run[TOTAL_LANES] = {};
        i64 j = 0;
        for (; j + TOTAL_LANES <= length; j += TOTAL_LANES) {
            fetch_ahead(x + at + j, TOTAL_LANES);
            for (int l = 0; l < TOTAL_LANES; ++l) run[l] = add(run[l], source[j + l]);
        }
        if (j < length) {  // zeros change no sum
            Element<T> last[TOTAL_LANES] = {};
            for (int l = 0; l < static_cast<int>(length - j); ++l) last[l] = x[at + j + l];
            const Widened<T> rest(last, TOTAL_LANES);
            for (int l = 0; l < TOTAL_LANES; ++l) run[l] = add(run[l], rest[l]);
        }
        at += length;
        for (int l = 0; l < TOTAL_LANES; ++l) add_exactly(hi[l], lo[l], run[l]);
    }
#pragma GCC unroll 5
    for (int half = TOTAL_LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 16
        for (int l = 0; l < half; ++l) {
            add_exactly(hi[l], lo[l], hi[l + half]);
            lo[l] += lo[l + half];
        }
    return {hi[0], lo[0], hi[0] == 0 ? 0.0 : 1.0};
}

template <int BYTES> struct Bits;
template <> struct Bits<2> { typedef int16_t type; };
template <> struct Bits<4> { typedef int32_t type; };
template <> struct Bits<8> { typedef int64_t type; };

// Bits without a sign are in the order of magnitudes, NaN above infinity.
template <typename T> double largest_of(const Element<T>* x, i64 count) {
    typedef typename Bits<sizeof(T)>::type B;
    constexpr B MAGNITUDE = static_cast<B>(~(uint64_t{1} << (8 * sizeof(T) - 1)));
    B largest = 0;
    for (i64 j = 0; j < count; ++j) {
        const B bits = static_cast<B>(bits_of<B>(x[j].value) & MAGNITUDE);
        largest = bits > largest ? bits : largest;
    }
    return wide(bits_of<T>(largest));
}

INLINE double size_of(double x) { return __builtin_fabs(x); }

// Sums relative to the largest element, or for p = 1 and 2 to a power of two near it. These are of
// float64, which had no room for sums of the numbers themselves.
template <typename T> Part relative_part(const Element<T>* x, i64 count, double p) {
    const double largest = largest_of(x, count);
    if (largest == 0) return {0, 0, 0};
    if (!(largest <= LARGEST)) return {largest, 0, LARGEST};
    double scale = largest;
    const auto part_over = [&](auto add) {
        Part part = sum_over(x, count, add);
        part.scale = scale;
        return part;
    };
    if constexpr (sizeof(T) == sizeof(double)) {
        if (p == 1 || p == 2) {
            scale = bits_of<double>(bits_of<uint64_t>(largest) & 0x7ff0000000000000);
            if (scale == 0) scale = 0x1p-1022;
        }
        if (p == 1) return part_over([=](double sum, double v) { return sum + size_of(v) / scale; });
        if (p == 2)
            return part_over([=](double sum, double v) {
                const double ratio = v / scale;
                return sum + ratio * ratio;
            });
    }
    return part_over([=](double sum, double v) {
        return sum + power_of_ratio(size_of(v), scale, p);
    });
}

template <typename T> Part part_of(const void* from, i64 count, double p) {
    const Element<T>* x = static_cast<const Element<T>*>(from);
    if (p == INFINITE) {
        const double largest = largest_of(x, count);
        return {largest, 0, largest == 0 ? 0.0 : 1.0};
    }
    if (p == 1) {
        const Part part = sum_over(x, count, [](double sum, double v) { return sum + size_of(v); });
        if (sizeof(T) < 8 || part.hi < 0x1p960) return part;
    } else if (p == 2) {
        const Part part = sum_over(x, count, [](double sum, auto v) { return add_square(sum, v); });
        // Neither has a square overflowed, nor lost digits that count.
        if (sizeof(T) < 8 || (part.hi > 0x1p-660 && part.hi < 0x1p960)) return part;
    }
    return relative_part(x, count, p);
}

// `largest` and the counts of what is 0 and not finite.
template <typename T> void tally(const Element<T>* x, i64 count, Stats& stats) {
    typedef typename Bits<sizeof(T)>::type B;
    constexpr B MAGNITUDE = static_cast<B>(~(uint64_t{1} << (8 * sizeof(T) - 1)));
    constexpr i64 RUN = 1 << 14;  // that a counter of 16 bits holds
    T infinite;
    narrow(INFINITE, infinite);
    const B beyond = bits_of<B>(infinite);
    B largest = 0;
    for (i64 at = 0; at < count;) {
        const i64 stop = at + RUN < count ? at + RUN : count;
        B zeros = 0, nonfinite = 0;
        for (; at < stop; ++at) {
            const B bits = static_cast<B>(bits_of<B>(x[at].value) & MAGNITUDE);
            largest = bits > largest ? bits : largest;
            zeros = static_cast<B>(zeros + (bits == 0));
            nonfinite = static_cast<B>(nonfinite + (bits >= beyond));
        }
        stats.zeros += zeros;
        stats.nonfinite += nonfinite;
    }
    stats.largest = wide(bits_of<T>(largest));
}

template <typename T> Stats stats_of(const void* from, i64 count) {
    const Element<T>* x = static_cast<const Element<T>*>(from);
    Stats stats = {part_of<T>(from, count, 2), {0, 0, 1}, 0, 0, 0};
    tally(x, count, stats);
    if (sizeof(T) == sizeof(double) && stats.largest > 0x1p900) {
        stats.sum = sum_over(x, count, [](double sum, double v) { return sum + v * 0x1p-100; });
        stats.sum.scale = 0x1p100;
    } else {
        stats.sum = sum_over(x, count, [](double sum, double v) { return sum + v; });
        stats.sum.scale = 1;  // a sum of 0 may have a lo
    }
    return stats;
}

// Writes value(x[j], j) to y[j], of numbers in the dtype of the computation.
template <typename T, typename F> INLINE void map(
    const void* from, void* to, i64 count, F value
) {
    const Element<T>* const source = static_cast<const Element<T>*>(from);
    Element<T>* const target = static_cast<Element<T>*>(to);
    for_parts<T>(target, count, [=](i64 at, i64 length) INLINED {
        const Widened<T> x(source + at, length);
        if (sizeof(T) == sizeof(float) && from == to) {
            i64 begin = 0;
            const auto own = [&](i64 j) INLINED { return value(x[begin + j], at + begin + j); };
            for (; begin + FEW <= length; begin += FEW) {
                fetch_ahead(source + at + begin, FEW);
                write_run(FEW, target + at + begin, own);
            }
            write_run(length - begin, target + at + begin, own);
            return;
        }
        if (count >= LONG_RUN) fetch_ahead(source + at, length);
        write_run(length, target + at, [&](i64 j) INLINED { return value(x[j], at + j); });
    });
}

// The places that rounding to T drops, from the highest bit on: a half has that alone.
INLINE uint32_t dropped(float x, bf16) { return bits_of<uint32_t>(x) << 16; }
INLINE uint32_t dropped(float x, f16) {
    constexpr float NORMAL = 0x1p-14f;  // below it numbers are as far apart as just above it
    const float size = __builtin_fabsf(x);
    return bits_of<uint32_t>(size < NORMAL ? size + NORMAL : size) << 19;
}

// Products in float32, which float64 and one rounding give too; false, and nothing is written, if
// one is so close to the middle of two numbers of T that it may not.
template <typename T, int COUNT> INLINE bool scale_narrow(
    const Element<T>* from, Element<T>* to, float factor
) {
    // Products are off by one and a half units of float32's last place at most.
    constexpr uint32_t MARGIN = 2u << (IS_BF16<T> ? 16 : 19), HALF = 1u << 31;
    const Widened<T> x(from, COUNT);
    Element<float> products[COUNT];
    uint32_t near = 0;
    for (int j = 0; j < COUNT; ++j) {
        products[j].value = x[j] * factor;
        near |= dropped(products[j].value, T{}) - (HALF - MARGIN) <= 2 * MARGIN;
    }
    if (near) return false;
    narrow_run(products, COUNT, to);
    return true;
}

template <typename T> void scale_all(const void* from, void* to, i64 count, double factor) {
    const auto exactly = [=](i64 at, i64 length) INLINED {
        const Element<T>* x = static_cast<const Element<T>*>(from) + at;
        Element<T>* y = static_cast<Element<T>*>(to) + at;
        map<T>(x, y, length, [=](double v, i64) INLINED { return v * factor; });
    };
    const float rounded = static_cast<float>(factor);
    if constexpr (sizeof(T) == sizeof(float))
        if (rounded == factor)  // products are exact in float64: they are rounded once either way
            return map<T>(from, to, count, [=](float x, i64) INLINED { return x * rounded; });
    i64 at = 0;
    if constexpr (sizeof(T) == 2) {
        constexpr int BLOCK = IS_BF16<T> ? 256 : 64;  // few of which have such a product
        const bool is_normal = size_of(factor) >= 0x1p-126 && size_of(factor) < 0x1p127;
        for (; is_normal && at + BLOCK <= count; at += BLOCK) {
            const Element<T>* x = static_cast<const Element<T>*>(from) + at;
            if (!scale_narrow<T, BLOCK>(x, static_cast<Element<T>*>(to) + at, rounded))
                exactly(at, BLOCK);
        }
    }
    exactly(at, count - at);
}

template <typename T> void scale_each(
    const void* from, void* to, i64 count, const double* factors
) {
    map<T>(from, to, count, [=](double x, i64 j) INLINED {
        return factors[j] < 0 ? 0 : x * factors[j];
    });
}

// By magnitudes, whose order is that of bits without a sign; a NaN stays. The limit may be -0.
template <typename T> void clamp_bits(const Element<T>* x, Element<T>* y, i64 count, T limit) {
    typedef typename Bits<sizeof(T)>::type B;
    T infinite;
    narrow(INFINITE, infinite);
    constexpr B SIGN = static_cast<B>(uint64_t{1} << (8 * sizeof(T) - 1));
    const B ends = bits_of<B>(limit), high = static_cast<B>(ends & ~SIGN), beyond = bits_of<B>(infinite);
    INDEPENDENT
    for (i64 j = 0; j < count; ++j) {
        const B own = bits_of<B>(x[j].value), size = static_cast<B>(own & ~SIGN);
        const B result = size > high && size <= beyond ? static_cast<B>((own & SIGN) ^ ends) : own;
        y[j].value = bits_of<T>(result);
    }
}

template <typename T> void clamp(const void* from, void* to, i64 count, double limit) {
    T rounded;
    narrow(limit, rounded);
    if constexpr (sizeof(T) == 2) {
        clamp_bits(static_cast<const Element<T>*>(from), static_cast<Element<T>*>(to), count, rounded);
    } else {
        map<T>(from, to, count, [=](T x, i64) INLINED {
            return x > rounded ? rounded : x < -rounded ? -rounded : x;
        });
    }
}

template <typename T> void add(const void* from, void* to, i64 count, double factor) {
    const auto by = static_cast<decltype(widen(T{}))>(factor);
    const Element<T>* const x = static_cast<const Element<T>*>(from);
    Element<T>* const y = static_cast<Element<T>*>(to);
    map_vectors(x, y, count, [=](i64 j, auto kind) INLINED {
        typedef decltype(kind) V;
        return read<V>(y + j) + read<V>(x + j) * by;
    });
}

template <typename T> void terms_of(const void* from, double* terms, i64 count, double scale) {
    for_blocks<T>(count, [=](i64 at, i64 length) INLINED {
        const Widened<T> x(static_cast<const Element<T>*>(from) + at, length);
        for (i64 j = 0; j < length; ++j) terms[at + j] = x[j] * scale;
    });
}

template <typename T> void add_terms(const double* terms, void* to, i64 count) {
    map<T>(to, to, count, [=](double y, i64 j) INLINED { return y + terms[j]; });
}

template <typename T> void store_terms(const double* terms, void* to, i64 count) {
    write_run(count, static_cast<Element<T>*>(to), [=](i64 j) INLINED { return terms[j]; });
}

// Knuth's two-sum, in which the sum is rounded to T. In loops that become vectors.
template <typename T> void compensate(
    const double* terms, void* to, void* rest, i64 count, bool fresh
) {
    constexpr i64 BLOCK = 128;
    double before[BLOCK], change[BLOCK];
    for (i64 at = 0; at < count; at += BLOCK) {
        const i64 some = count - at < BLOCK ? count - at : BLOCK;
        Element<T>* y = static_cast<Element<T>*>(to) + at;
        Element<T>* c = static_cast<Element<T>*>(rest) + at;
        for (i64 j = 0; j < some; ++j) {
            before[j] = fresh ? -0.0 : wide(y[j].value);
            change[j] = (fresh ? -0.0 : wide(c[j].value)) + terms[at + j];
        }
        INDEPENDENT
        for (i64 j = 0; j < some; ++j) narrow(before[j] + change[j], y[j]);
        INDEPENDENT
        for (i64 j = 0; j < some; ++j) {
            const double after = wide(y[j].value), moved = after - before[j];
            const double dropped = (before[j] - (after - moved)) + (change[j] - moved);
            change[j] = after - after == 0 ? dropped : 0;
        }
        INDEPENDENT
        for (i64 j = 0; j < some; ++j) narrow(change[j], c[j]);
    }
}

// From the end that is nearer; a difference that overflows is not taken.
template <typename V, typename A> INLINE V between(V old, V param, A kept, A rest, bool nearer) {
    if constexpr (ARE_TWINS<V>) {
        return {
            between(old.even, param.even, kept, rest, nearer), between(old.odd, param.odd, kept, rest, nearer)
        };
    } else {
        const V step = param - old, moved = nearer ? param - step * kept : old + step * rest;
        return step - step == V{} ? moved : old * kept + param * rest;
    }
}

template <typename T> void average(const void* from, void* to, i64 count, double decay) {
    typedef decltype(widen(T{})) A;
    const A kept = static_cast<A>(decay), rest = static_cast<A>(1 - decay);
    const bool nearer = decay < 0.5;
    const Element<T>* const x = static_cast<const Element<T>*>(from);
    Element<T>* const y = static_cast<Element<T>*>(to);
    // GCC reads numbers anew for each use, and vectors once.
    map_vectors(x, y, count, [=](i64 j, auto kind) INLINED {
        typedef decltype(kind) V;
        return between(read<V>(y + j), read<V>(x + j), kept, rest, nearer);
    });
}

template <typename T> void move(
    const void* now, const double* batch, void* next, i64 count, double factor, double weight
) {
    map<T>(now, next, count, [=](double x, i64 j) INLINED {
        const double own = batch[j] * factor;
        return weight == 0 ? x : weight == 1 ? own : (1 - weight) * x + weight * own;
    });
}

// Past the caches, if that can be.
void zero(void* to, i64 bytes) {
    char* at = static_cast<char*>(to);
    if constexpr (STREAMS<float, float>) {
        typedef VectorOf<float>::type V;
        const auto nothing = [](i64, V kind) INLINED { return kind; };
        for (; bytes && reinterpret_cast<uintptr_t>(at) % LINE; --bytes) *at++ = 0;
        for (; bytes >= LINE; bytes -= LINE, at += LINE)
            stream_line<V>(0, reinterpret_cast<Element<float>*>(at), nothing);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
    }
    __builtin_memset(at, 0, bytes);
}

template <typename T> void round_at_random(
    const double* terms, void* to, i64 count, bool fresh, u64 key, u64 counter
) {
    Element<T>* y = static_cast<Element<T>*>(to);
    INDEPENDENT
    for (i64 j = 0; j < count; ++j) {
        const double sum = (fresh ? -0.0 : wide(y[j].value)) + terms[j];
        const u32 bits = random_bits(key, counter + static_cast<u64>(j));
        y[j].value.bits = rounded_at_random<T>(bits_of<u64>(sum), bits);
    }
}

// Calls run(T{}) for the type of a dtype.
template <typename F> INLINE void with_type(Dtype dtype, F run) {
    switch (dtype) {
    case F16: return run(f16{});
    case BF16: return run(bf16{});
    case F32: return run(float{});
    case F64: return run(double{});
    }
}

template <typename A> constexpr Dtype DTYPE_OF = sizeof(A) == sizeof(float) ? F32 : F64;

INLINE i64 itemsize_of(Dtype dtype) { return dtype == F64 ? 8 : dtype == F32 ? 4 : 2; }

// A run of elements as numbers of A: where they lie if they are such, and else in a copy.
constexpr i64 COPIED = 512;
template <typename A> class Opened {
public:
    INLINE Element<A>* open(Dtype dtype, char* at, i64 count) {
        dtype_ = dtype;
        at_ = at;
        if (dtype == DTYPE_OF<A>) return reinterpret_cast<Element<A>*>(at);
        with_type(dtype, [&](auto kind) INLINED {
            widen_run(reinterpret_cast<const Element<decltype(kind)>*>(at), count, copy_);
        });
        return copy_;
    }
    INLINE void close(i64 count) {
        if (dtype_ == DTYPE_OF<A>) return;
        with_type(dtype_, [&](auto kind) INLINED {
            narrow_run(copy_, count, reinterpret_cast<Element<decltype(kind)>*>(at_));
        });
    }
    INLINE void close_at_random(i64 count, const Randomness& random) {
        if (dtype_ == F16) round_copy<f16>(count, random);
        else round_copy<bf16>(count, random);
    }

private:
    template <typename T> INLINE void round_copy(i64 count, const Randomness& random) {
        Element<T>* to = reinterpret_cast<Element<T>*>(at_);
        INDEPENDENT
        for (i64 j = 0; j < count; ++j) {
            const u32 bits = random_bits(random.key, random.counter + static_cast<u64>(j));
            to[j].value.bits = rounded_at_random<T>(bits_of<u64>(static_cast<double>(copy_[j].value)), bits);
        }
    }

    Dtype dtype_;
    char* at_;
    alignas(LINE) Element<A> copy_[COPIED];
};

// Calls step(arrays, j, V{}) for vectors V of numbers A, from number j on: the first so many one by one.
template <typename A, typename V, int SIDES, typename T, typename F> INLINE void for_vectors(
    Element<T>* const* arrays, i64 before, i64 count, F step
) {
    i64 j = 0;
    for (; j < before && j < count; ++j) step(arrays, j, A{});
    for (; j + LENGTH<V> <= count; j += LENGTH<V>) {
        for (int k = 0; k < SIDES; ++k) fetch_halves_ahead(arrays[k] + j, LENGTH<V>);
        step(arrays, j, V{});
    }
    for (; j < count; ++j) step(arrays, j, A{});
}

// The same for arrays side by side of any dtypes. All but the second are written.
template <typename A, int SIDES, typename F> INLINE void update(
    const Dtype* dtypes, char* const* at, i64 count, const Randomness* random, F step
) {
    bool are_same = !random;
    for (int k = 1; k < SIDES; ++k) are_same &= dtypes[k] == dtypes[0];
    if (are_same)
        return with_type(dtypes[0], [&](auto kind) INLINED {
            typedef decltype(kind) T;
            if constexpr (sizeof(widen(kind)) == sizeof(A)) {
                Element<T>* own[SIDES];
                for (int k = 0; k < SIDES; ++k) own[k] = reinterpret_cast<Element<T>*>(at[k]);
                for_vectors<A, typename Computed<T>::type, SIDES>(own, before_line(own[0]), count, step);
            }
        });
    Opened<A> sides[SIDES];
    for (i64 from = 0; from < count; from += COPIED) {
        const i64 length = from + COPIED < count ? COPIED : count - from;
        Element<A>* own[SIDES];
        for (int k = 0; k < SIDES; ++k)
            own[k] = sides[k].open(dtypes[k], at[k] + from * itemsize_of(dtypes[k]), length);
        for_vectors<A, typename Computed<A>::type, SIDES>(own, 0, length, step);
        if (random)
            sides[0].close_at_random(length, {random->key, random->counter + static_cast<u64>(from)});
        else
            sides[0].close(length);
        for (int k = 2; k < SIDES; ++k) sides[k].close(length);
    }
}

template <typename A> void adamw_as(
    const Dtype* dtypes, char* const* at, i64 count, const double* numbers, const Randomness* random
) {
    const Adamw<A> by(*reinterpret_cast<const AdamwNumbers<double>*>(numbers));
    update<A, 4>(dtypes, at, count, random, [=](auto arrays, i64 j, auto lanes) INLINED {
        typedef decltype(lanes) V;
        V param = read<V>(arrays[0] + j), moment = read<V>(arrays[2] + j);
        V variance = read<V>(arrays[3] + j);
        by.step(param, read<V>(arrays[1] + j), moment, variance);
        write(param, arrays[0] + j);
        write(moment, arrays[2] + j);
        write(variance, arrays[3] + j);
    });
}

template <typename A> void sgd_as(
    const Dtype* dtypes, char* const* at, i64 count, const SgdFactors& factors, const Randomness* random
) {
    const Sgd<A> by(factors.lr, factors.scale, factors.momentum, factors.decay, factors.nesterov);
    if (!factors.has_momenta)
        return update<A, 2>(dtypes, at, count, random, [=](auto arrays, i64 j, auto lanes) INLINED {
            typedef decltype(lanes) V;
            V param = read<V>(arrays[0] + j);
            by.step(param, read<V>(arrays[1] + j));
            write(param, arrays[0] + j);
        });
    update<A, 3>(dtypes, at, count, random, [=](auto arrays, i64 j, auto lanes) INLINED {
        typedef decltype(lanes) V;
        V param = read<V>(arrays[0] + j), momentum = read<V>(arrays[2] + j);
        by.step(param, read<V>(arrays[1] + j), momentum);
        write(param, arrays[0] + j);
        write(momentum, arrays[2] + j);
    });
}

void adamw(
    const Dtype* dtypes, char* const* at, i64 count, const double* numbers, const Randomness* random
) {
    (dtypes[0] == F64 ? adamw_as<double> : adamw_as<float>)(dtypes, at, count, numbers, random);
}

void sgd(
    const Dtype* dtypes, char* const* at, i64 count, const SgdFactors& by, const Randomness* random
) {
    (dtypes[0] == F64 ? sgd_as<double> : sgd_as<float>)(dtypes, at, count, by, random);
}

#define OF_EACH_DTYPE(function) {function<f16>, function<bf16>, function<float>, function<double>}

const ListKernels list_kernels = {
    OF_EACH_DTYPE(part_of),    OF_EACH_DTYPE(stats_of), OF_EACH_DTYPE(scale_all),
    OF_EACH_DTYPE(scale_each), OF_EACH_DTYPE(clamp),    OF_EACH_DTYPE(add),
    OF_EACH_DTYPE(terms_of),   OF_EACH_DTYPE(add_terms), OF_EACH_DTYPE(store_terms),
    OF_EACH_DTYPE(compensate), OF_EACH_DTYPE(average),  OF_EACH_DTYPE(move),
    zero,
    {round_at_random<f16>, round_at_random<bf16>, nullptr, nullptr},
    adamw,                     sgd,
};

}  // namespace ISA
