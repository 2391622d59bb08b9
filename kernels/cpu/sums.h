// Vectors, and sums over a row in an order that is the same for each instruction set.

#pragma once

#include <type_traits>

#include "floats.h"

// Bytes of a register.
#if defined(__AVX512F__)
#define VECTOR_BYTES 64
#elif defined(__AVX__)
#define VECTOR_BYTES 32
#else
#define VECTOR_BYTES 16
#endif

// For 16-bit numbers; a shift and a conversion are three instructions.
#if defined(__AVX512BW__) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define ONE_SHUFFLE
#endif
#endif

namespace ISA {

// A sum has so many totals, whatever a vector holds.
template <typename A> constexpr int LANES = 128 / sizeof(A);
// Elements that one set of totals holds before float64 takes over.
template <typename A> constexpr i64 RUN = 8 * LANES<A>;
// And in float64, before the lanes are added up.
template <typename A> constexpr i64 CHUNK = 4 * RUN<A>;
constexpr int MOST_CHUNKS = 64;  // so at most 32,768 columns are summed at a time

template <typename A, int COUNT = VECTOR_BYTES / sizeof(A)> struct VectorOf {
    typedef A type __attribute__((vector_size(COUNT * sizeof(A))));
    static constexpr int length = COUNT;
};

template <typename V> struct PlainOf {
    typedef V type;
};
template <typename V> struct PlainOf<V&> {
    typedef V type;
};
template <typename V> using Plain = typename PlainOf<V>::type;

template <int... I> struct Indices {};
template <int N, int... I> struct UpTo : UpTo<N - 1, N - 1, I...> {};
template <int... I> struct UpTo<0, I...> {
    typedef Indices<I...> type;
};
template <typename V> constexpr int LENGTH = sizeof(V) / sizeof(V{}[0]);

// From number FIRST on. One instruction from GCC, which makes several of __builtin_convertvector.
template <typename V, int FIRST, typename From, int... I> INLINE V converted(
    From from, Indices<I...>
) {
    return V{from[FIRST + I]...};
}
template <typename V, int FIRST = 0, typename From> INLINE V converted(From from) {
    return converted<V, FIRST>(from, typename UpTo<LENGTH<V>>::type());
}

// Lanes I of two vectors, side by side: those of the second one follow the first one's.
template <int... I, typename V> INLINE V lanes_of(V first, V second) {
#ifdef __clang__
    return __builtin_shufflevector(first, second, I...);
#else
    return __builtin_shuffle(first, second, decltype(V{} == V{}){I...});
#endif
}

// The sum of a vector's lanes is that of lanes DISTANCE apart, which are added up, and so on.
template <int DISTANCE, typename V, int... I> INLINE V by_halves(V lanes, Indices<I...> all) {
    if constexpr (DISTANCE == 0)
        return lanes;
    else
        return by_halves<DISTANCE / 2>(lanes + lanes_of<(I ^ DISTANCE)...>(lanes, lanes), all);
}

// Sums two vectors at once, for half of the instructions: the sums are at 0 and in the middle.
template <typename V, int... I> INLINE V both_by_halves(V first, V second, Indices<I...> all) {
    constexpr int length = sizeof...(I), half = length / 2;
    const V lower = lanes_of<(I % half + I / half * length)...>(first, second);
    const V upper = lanes_of<(I % half + I / half * length + half)...>(first, second);
    return by_halves<half / 2>(lower + upper, all);
}

// Vectors of 16-bit numbers.
template <int COUNT> struct Halves {
    typedef typename VectorOf<uint16_t, COUNT>::type Stored;
    typedef typename VectorOf<uint32_t, COUNT>::type Bits;
    typedef typename VectorOf<float, COUNT>::type Floats;

    static INLINE Floats widened(Stored from, bf16) {
        return bits_of<Floats>(converted<Bits>(from) << 16);
    }
    static INLINE Floats widened(Stored from, f16) {
#if CONVERTS_F16
        if constexpr (COUNT == AT_ONCE)
            return TO_FLOATS(bits_of<HalvesAtOnce>(from));
        else if constexpr (COUNT == 8)
            return TO_EIGHT_FLOATS(bits_of<EightHalves>(from));
#endif
        return widen_f16<Floats>(converted<Bits>(from));
    }
    static INLINE Stored narrowed(Floats from, bf16) {
        return upper_halves(narrow_to_bf16<Floats, Bits>(from), typename UpTo<COUNT>::type());
    }
    template <int... I> static INLINE Stored upper_halves(Bits from, Indices<I...>) {
#ifdef ONE_SHUFFLE
        const auto halves = bits_of<typename VectorOf<uint16_t, 2 * COUNT>::type>(from);
        return __builtin_shufflevector(halves, halves, 2 * I + 1 ...);
#else
        return __builtin_convertvector(from >> 16, Stored);
#endif
    }
    static INLINE Stored narrowed(Floats from, f16) {
#if CONVERTS_F16
        if constexpr (COUNT == AT_ONCE)
            return bits_of<Stored>(TO_HALVES(from));
#endif
        return __builtin_convertvector(narrow_to_f16<Floats, Bits>(from), Stored);
    }
};

// Numbers that lie side by side in bfloat16: those at even places, and those at odd ones. To take them
// apart and to join them takes no shuffle.
template <typename V> struct Twins {
    V even, odd;
};
template <typename V> constexpr int LENGTH<Twins<V>> = 2 * LENGTH<V>;
template <typename V> constexpr bool ARE_TWINS = false;
template <typename V> constexpr bool ARE_TWINS<Twins<V>> = true;

template <typename B> INLINE B even_of(B number) { return number; }
template <typename B> INLINE B odd_of(B number) { return number; }
template <typename V> INLINE V even_of(Twins<V> twins) { return twins.even; }
template <typename V> INLINE V odd_of(Twins<V> twins) { return twins.odd; }
template <typename V, typename B> INLINE Twins<V> operator+(Twins<V> a, B b) {
    return {a.even + even_of(b), a.odd + odd_of(b)};
}
template <typename V, typename B> INLINE Twins<V> operator-(Twins<V> a, B b) {
    return {a.even - even_of(b), a.odd - odd_of(b)};
}
template <typename V, typename B> INLINE Twins<V> operator*(Twins<V> a, B b) {
    return {a.even * even_of(b), a.odd * odd_of(b)};
}
template <typename V, typename B> INLINE Twins<V> operator/(Twins<V> a, B b) {
    return {a.even / even_of(b), a.odd / odd_of(b)};
}

template <typename V> INLINE Twins<V>& operator+=(Twins<V>& a, Twins<V> b) { return a = a + b; }

constexpr uint32_t UPPER_HALF = 0xffff0000;

// A number, or a vector of them, from where it lies; twins of float32 from numbers that are `paired`.
template <typename V, typename T> INLINE V read(const Element<T>* from) {
    if constexpr (ARE_TWINS<V> && sizeof(T) == sizeof(float)) {
        typedef decltype(V::even) F;
        return {read<F>(from), read<F>(from + LENGTH<F>)};
    } else if constexpr (ARE_TWINS<V>) {
        typedef decltype(V::even) F;
        typename VectorOf<uint32_t, LENGTH<F>>::type both;
        __builtin_memcpy(&both, from, sizeof both);
        return {bits_of<F>(both << 16), bits_of<F>(both & UPPER_HALF)};
    } else if constexpr (sizeof(V) <= sizeof(double)) {
        return static_cast<V>(widen(from->value));
    } else if constexpr (sizeof(T) == 2) {
        typedef Halves<LENGTH<V>> H;
        typename H::Stored found;
        __builtin_memcpy(&found, from, sizeof found);
        return converted<V>(H::widened(found, T{}));
    } else {
        typename VectorOf<T, LENGTH<V>>::type found;
        __builtin_memcpy(&found, from, sizeof found);
        if constexpr (sizeof found == sizeof(V)) return found;
        else return converted<V>(found);
    }
}

// Rounded to nearest.
template <typename V, typename T> INLINE void write(V value, Element<T>* to) {
    if constexpr (ARE_TWINS<V> && sizeof(T) == sizeof(float)) {
        write(value.even, to);
        write(value.odd, to + LENGTH<decltype(V::even)>);
    } else if constexpr (ARE_TWINS<V>) {
        typedef decltype(V::even) F;
        typedef typename VectorOf<uint32_t, LENGTH<F>>::type Bits;
        const Bits even = round_to_upper_half<F, Bits>(value.even) >> 16;
        const Bits both = even | (round_to_upper_half<F, Bits>(value.odd) & UPPER_HALF);
        __builtin_memcpy(to, &both, sizeof both);
    } else if constexpr (sizeof(V) <= sizeof(double)) {
        narrow(value, *to);
    } else if constexpr (sizeof(T) == 2) {
        const auto found = Halves<LENGTH<V>>::narrowed(value, T{});
        __builtin_memcpy(to, &found, sizeof found);
    } else {
        static_assert(sizeof(V) == LENGTH<V> * sizeof(T), "of one type");
        __builtin_memcpy(to, &value, sizeof value);
    }
}

typedef Twins<VectorOf<float>::type> Pair;

// The vectors of numbers that are paired, of two that follow one another.
template <int... I> INLINE Pair paired(Pair from, Indices<I...>) {
    return {lanes_of<(2 * I)...>(from.even, from.odd), lanes_of<(2 * I + 1)...>(from.even, from.odd)};
}

// And back.
template <int... I> INLINE Pair unpaired(Pair from, Indices<I...>) {
    constexpr int half = sizeof...(I) / 2;
    return {
        lanes_of<(I / 2 + I % 2 * 2 * half)...>(from.even, from.odd),
        lanes_of<(half + I / 2 + I % 2 * 2 * half)...>(from.even, from.odd),
    };
}

// Pairs numbers, or undoes it: those of each whole pair of vectors lie as twins hold them, even places
// first. If they are no whole pairs, the last pair of them follows the others, for `read_beside`.
template <bool PAIRS> INLINE void pair(i64 count, Element<float>* numbers) {
    constexpr i64 length = LENGTH<Pair>;
    constexpr auto all = typename UpTo<length / 2>::type();
    if (PAIRS && count > length && count % length)
        write(paired(read<Pair>(numbers + count - length), all), numbers + count);
    for (i64 j = 0; j + length <= count; j += length) {
        const Pair own = read<Pair>(numbers + j);
        write(PAIRS ? paired(own, all) : unpaired(own, all), numbers + j);
    }
}

// Those that lie beside column j. Twins that begin at no whole pair are the last ones.
template <typename V, typename T> INLINE V read_beside(const Element<T>* numbers, i64 j) {
    if constexpr (ARE_TWINS<V>)
        if (j % LENGTH<V>) j += LENGTH<V>;
    return read<V>(numbers + j);
}

// Calls store(j, value(j, V)) for `count` columns, a vector V at a time and no fewer than it has; the last
// one is at the end, over the one before it. An output may be an input, whose last columns are read first.
template <typename V, typename F, typename S> INLINE void each_vector(i64 count, F value, S store) {
    const i64 last = count - LENGTH<V>;
    const auto end = value(last, V{});
    for (i64 j = 0; j < last; j += LENGTH<V>) store(j, value(j, V{}));
    store(last, end);
}

template <typename V, typename T, typename F> INLINE void write_vectors(
    i64 count, Element<T>* to, F value
) {
    each_vector<V>(count, value, [=](i64 j, V own) INLINED { write(own, to + j); });
}

// The same of any number of columns.
template <typename A, typename T, typename F> INLINE void write_columns(
    i64 count, Element<T>* to, F value
) {
    typedef typename VectorOf<A>::type V;
    if (count >= LENGTH<V>) return write_vectors<V>(count, to, value);
    INDEPENDENT
    for (i64 j = 0; j < count; ++j) write(value(j, A{}), to + j);
}

template <typename T> constexpr bool IS_BF16 = false;
template <> inline constexpr bool IS_BF16<bf16> = true;

// The same of what a column's value depends on by its element alone: bfloat16 may be twins.
template <typename A, typename T, typename F> INLINE void write_line(
    i64 count, Element<T>* to, F value
) {
    typedef Twins<typename VectorOf<A>::type> W;
    if constexpr (IS_BF16<T>)
        if (count >= LENGTH<W>) return write_vectors<W>(count, to, value);
    write_columns<A>(count, to, value);
}

// Columns that are read at a time, in A, of a row of dtype T.
template <typename A, typename T> using ColumnsOf = std::conditional_t<
    IS_BF16<T> && sizeof(A) == sizeof(float), Pair, typename VectorOf<A>::type>;

// Calls store(j, value(j, kind)) for each column of what is paired if rows are bfloat16.
template <typename A, typename T, typename F, typename S> INLINE void each_column(
    i64 count, F value, S store
) {
    typedef typename VectorOf<A>::type V;
    i64 j = 0;
    if constexpr (IS_BF16<T>)
        for (; j + LENGTH<Pair> <= count; j += LENGTH<Pair>) store(j, value(j, Pair{}));
    else if (count >= LENGTH<V>)
        return each_vector<V>(count, value, store);
    for (; j + LENGTH<V> <= count; j += LENGTH<V>) store(j, value(j, V{}));
    for (; j < count; ++j) store(j, value(j, A{}));
}

// True if numbers can be written past the caches, in T, without what they replace being read first: a
// line of the caches at a time.
#ifdef __AVX__
template <typename A, typename T> constexpr bool STREAMS = !IS_BF16<T>;
#else
template <typename A, typename T> constexpr bool STREAMS = false;
#endif
constexpr i64 LINE = 64;  // bytes
template <typename T> constexpr i64 LINE_OF = LINE / sizeof(T);

// Elements from an address to the next line.
template <typename T> INLINE i64 to_next_line(const Element<T>* from) {
    return -(reinterpret_cast<intptr_t>(from) / i64{sizeof(T)}) & (LINE_OF<T> - 1);
}

// A part of a line, which is written at once; the address is a multiple of its size.
template <typename V, typename T> INLINE void stream(V value, Element<T>* to) {
    constexpr int size = LENGTH<V> * sizeof(T);
    typedef typename VectorOf<long long, size / sizeof(long long)>::type Words;
    Words words;
    write(value, reinterpret_cast<Element<T>*>(&words));
#ifdef __clang__
    __builtin_nontemporal_store(words, reinterpret_cast<Words*>(to));
#else
    if constexpr (size == 16)
        __builtin_ia32_movntdq(reinterpret_cast<Words*>(to), words);
#ifdef __AVX__
    if constexpr (size == 32)
        __builtin_ia32_movntdq256(reinterpret_cast<Words*>(to), words);
#endif
#ifdef __AVX512F__
    if constexpr (size == 64)
        __builtin_ia32_movntdq512(reinterpret_cast<Words*>(to), words);
#endif
#endif
}

// A line of value(j, V) from column j on.
template <typename V, typename T, typename F> INLINE void stream_line(i64 j, Element<T>* to, F value) {
#pragma GCC unroll 4
    for (i64 k = 0; k < LINE_OF<T>; k += LENGTH<V>) stream(value(j + k, V{}), to + j + k);
}

// Writes of(line)(j, V) to column j of lines that lie side by side and are no shorter than a vector,
// past the caches. A vector that lies in two lines is computed for both. No output is an input.
template <typename A, typename T, typename F> INLINE void stream_lines(
    i64 lines, i64 count, Element<T>* to, F of
) {
    typedef typename VectorOf<A>::type V;
    constexpr i64 length = VectorOf<A>::length;
    V index;
    for (int l = 0; l < length; ++l) index[l] = static_cast<A>(l);
    i64 j = 0;  // from the first column of a line
    for (i64 l = 0, begin = to_next_line(to); l < lines; ++l, j -= count, to += count, begin -= count) {
        const auto value = of(l);
        for (; j < begin && j < count; ++j) write(value(j, A{}), to + j);
        if (l + 1 == lines) {
            for (; j + LINE_OF<T> <= count; j += LINE_OF<T>) stream_line<V>(j, to, value);
            for (; j < count; ++j) write(value(j, A{}), to + j);
            return;
        }
        for (; j + length <= count; j += length) stream(value(j, V{}), to + j);
        if (j < count) {
            const V own = value(j, V{}), next = of(l + 1)(j - count, V{});
            stream(index < static_cast<A>(count - j) ? own : next, to + j);
            j += length;
        }
    }
}

// Writes rows past the caches. If a row begins where the one before it ends, the line of both is held
// until it is whole. No output is an input.
template <typename A, typename T> class StreamedRows {
    typedef typename VectorOf<A>::type V;
    static constexpr i64 COUNT = LINE_OF<T>;

public:
    // Streamed stores are written by then.
    ~StreamedRows() {
        finish();
        if constexpr (STREAMS<A, T>)
            if (end_) __atomic_thread_fence(__ATOMIC_SEQ_CST);
    }

    // Writes value(j, V) to column j of a row that is no shorter than a line.
    template <typename F> INLINE void write_row(i64 count, Element<T>* to, F value) {
        const auto near = [=](i64 j, Element<T>* line) INLINED {
            for (i64 k = 0; k < COUNT; k += LENGTH<V>) write(value(j + k, V{}), line + k);
        };
        i64 j = 0;
        if (to != end_) {
            finish();
            for (const i64 begin = to_next_line(to); j < begin; ++j) write(value(j, A{}), to + j);
        } else if (held_) {
            near(0, line_ + held_);
            for (i64 k = 0; k < COUNT; k += LENGTH<V>) stream(read<V>(line_ + k), to - held_ + k);
            j = COUNT - held_;
        }
        for (; j + COUNT <= count; j += COUNT) stream_line<V>(j, to, value);
        held_ = count - j;
        end_ = to + count;
        if (held_ == 0) return;
        Element<T> last[2 * COUNT] = {};
        near(count - COUNT, last);
        __builtin_memcpy(line_, last + COUNT - held_, LINE);
    }

private:
    void finish() {
        for (i64 j = 0; j < held_; ++j) end_[j - held_] = line_[j];
        held_ = 0;
    }

    Element<T> line_[2 * COUNT];
    Element<T>* end_ = nullptr;
    i64 held_ = 0;
};

struct Sums {
    double first, second;
};

// Equal terms double without an error; one running total of them drifts by a unit for every four.
INLINE double by_halves(double* values, int count) {
    while (count > 1) {
        const int half = count / 2;
        for (int k = 0; k < half; ++k) values[k] += values[count - half + k];
        count -= half;
    }
    return values[0];
}

// Adds vectors of totals to as many lanes of float64.
template <typename D, typename V, int... I> INLINE void add_lanes(
    D* to, const V* from, Indices<I...>
) {
    constexpr int parts = LENGTH<V> / LENGTH<D>;
    ((to[I] += converted<D, I % parts * LENGTH<D>>(from[I / parts])), ...);
}

// Those of twins: the totals at even places are first.
template <typename D, typename V, int... I> INLINE void add_lanes(
    D* to, const Twins<V>* from, Indices<I...> all
) {
    constexpr int twins = LANES<float> / LENGTH<Twins<V>>;
    V totals[2 * twins];
    for (int t = 0; t < twins; ++t) {
        totals[t] = from[t].even;
        totals[twins + t] = from[t].odd;
    }
    add_lanes(to, totals, all);
}

// The terms of fewer columns than a vector has. What is stored number by number would be waited for.
template <typename V, typename F> INLINE void add_last(
    i64 at, i64 stop, V& first, V& second, F add
) {
    typedef Plain<decltype(first[0])> A;
    V index;
    for (int l = 0; l < LENGTH<V>; ++l) index[l] = static_cast<A>(l);
    for (A l = 0; at < stop; ++at, ++l) {
        A one = 0, two = 0;
        add(at, one, two);
        first = index == l ? V{} + one : first;
        second = index == l ? V{} + two : second;
    }
}

// The same of twins.
template <typename V, typename F> INLINE void add_last(
    i64 at, i64 stop, Twins<V>& first, Twins<V>& second, F add
) {
    V index;
    for (int l = 0; l < LENGTH<V>; ++l) index[l] = static_cast<float>(l);
    int l = 0;
    if (at + LENGTH<V> <= stop) {
        constexpr auto all = typename UpTo<LENGTH<V>>::type();
        Twins<V> ones = {}, twos = {};
        add(at, ones.even, twos.even);
        first = paired(ones, all);
        second = paired(twos, all);
        at += l = LENGTH<V>;
    }
    for (; at < stop; ++at, ++l) {
        float one = 0, two = 0;
        add(at, one, two);
        V &ones = l % 2 ? first.odd : first.even, &twos = l % 2 ? second.odd : second.even;
        const float place = static_cast<float>(l / 2);
        ones = index == place ? V{} + one : ones;
        twos = index == place ? V{} + two : twos;
    }
}

// Two sums over columns: add(column, first, second) adds the terms of a column, or of as many as a
// vector V or twins have, to two totals.
template <typename A, typename V = typename VectorOf<A>::type, typename F> INLINE Sums sums_over(
    i64 width, F add
) {
    typedef typename VectorOf<double>::type D;
    constexpr int length = LENGTH<V>, vectors = LANES<A> / length, wide = LANES<A> / LENGTH<D>;
    double first[MOST_CHUNKS], second[MOST_CHUNKS];
    int chunks = 0;
    i64 at = 0;
    do {
        const i64 end = at + CHUNK<A> < width ? at + CHUNK<A> : width;
        D lanes[2][wide] = {};
        while (at < end) {
            const i64 stop = at + RUN<A> < end ? at + RUN<A> : end;
            V run[2][vectors] = {};
            for (; at + LANES<A> <= stop; at += LANES<A>)
#pragma GCC unroll 8
                for (int v = 0; v < vectors; ++v) add(at + v * length, run[0][v], run[1][v]);
            for (int v = 0; at < stop; ++v) {
                V rest[2] = {};
                if (at + length <= stop) {
                    add(at, rest[0], rest[1]);
                    at += length;
                } else {
                    add_last(at, stop, rest[0], rest[1], add);
                    at = stop;
                }
                // Totals stay in registers if no number that is known late chooses one.
#pragma GCC unroll 8
                for (int w = 0; w < vectors; ++w)
                    if (w == v)
                        for (int k = 0; k < 2; ++k) run[k][w] += rest[k];
            }
            for (int k = 0; k < 2; ++k) add_lanes(lanes[k], run[k], typename UpTo<wide>::type());
        }
#pragma GCC unroll 4
        for (int half = wide / 2; half > 0; half /= 2)
#pragma GCC unroll 8
            for (int l = 0; l < half; ++l)
#pragma GCC unroll 2
                for (int k = 0; k < 2; ++k) lanes[k][l] += lanes[k][l + half];
        const D sums = both_by_halves(lanes[0][0], lanes[1][0], typename UpTo<LENGTH<D>>::type());
        first[chunks] = sums[0];
        second[chunks] = sums[LENGTH<D> / 2];
        ++chunks;
    } while (at < width);
    return {by_halves(first, chunks), by_halves(second, chunks)};
}

}  // namespace ISA
