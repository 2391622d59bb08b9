// Norms over channels on a CPU, for one instruction set: ISA names it, and the namespace.
//
// Bits are the same for each instruction set: sums have as many totals, whatever a vector holds, and
// nothing is fused. channels.h has the formulas.

#include "channels.h"

#include "sums.h"

namespace ISA {

template <typename V, typename A> INLINE V at(const A* from) {
    return read<V>(reinterpret_cast<const Element<A>*>(from));
}

template <typename T> INLINE Element<T>* line(Lines lines, i64 row, i64 channel = 0) {
    return reinterpret_cast<Element<T>*>(lines.data + row * lines.stride + channel * lines.channel);
}

// Columns whose sums stay in registers while rows are read.
template <typename A> constexpr int STRIP = 4 * VectorOf<A>::length;

// So many vectors of them, or numbers.
template <typename V, int MANY, typename A, typename F> INLINE void add_strip(
    i64 rows, i64 from, A* first, A* second, F terms
) {
    constexpr int length = sizeof(V) / sizeof(A);
    V one[MANY], two[MANY];
#pragma GCC unroll 4
    for (int v = 0; v < MANY; ++v) {
        one[v] = at<V>(first + from + v * length);
        two[v] = at<V>(second + from + v * length);
    }
    for (i64 r = 0; r < rows; ++r) {
        terms.fetch(r, from, MANY * length);
#pragma GCC unroll 4
        for (int v = 0; v < MANY; ++v) terms.add(r, from + v * length, one[v], two[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < MANY; ++v) {
        write(one[v], reinterpret_cast<Element<A>*>(first + from + v * length));
        write(two[v], reinterpret_cast<Element<A>*>(second + from + v * length));
    }
}

// Adds terms(row, column, one, two) of all rows to two sums of each column.
template <typename A, typename F> INLINE void add_rows(
    i64 rows, i64 count, A* first, A* second, F terms
) {
    typedef typename VectorOf<A>::type V;
    constexpr int length = VectorOf<A>::length;
    i64 j = 0;
    for (; j + STRIP<A> <= count; j += STRIP<A>)
        add_strip<V, STRIP<A> / length>(rows, j, first, second, terms);
    for (; j + 2 * length <= count; j += 2 * length) add_strip<V, 2>(rows, j, first, second, terms);
    for (; j + length <= count; j += length) add_strip<V, 1>(rows, j, first, second, terms);
    for (; j < count; ++j) add_strip<A, 1>(rows, j, first, second, terms);
}

// Totals of a sum, the same whatever a vector holds: of elements LANES apart, and of those that are
// beyond the last 64 bytes of a line.
template <typename A> struct Totals {
    typedef typename VectorOf<A>::type V;
    static constexpr int length = VectorOf<A>::length, count = LANES<A> / length, half = count / 2;
    static constexpr int tail = 64 / sizeof(A);

    V vectors[count], rest[half];

    // The terms of a vector: lanes that are vectors apart are added up.
    INLINE V lanes() const {
        V folded[half];
        for (int v = 0; v < half; ++v) folded[v] = vectors[v] + vectors[v + half] + rest[v];
        for (int next = half / 2; next > 0; next /= 2)
            for (int v = 0; v < next; ++v) folded[v] += folded[v + next];
        return folded[0];
    }
};

// Adds the terms of columns [from, stop) of a line to two totals.
template <typename A, typename F> INLINE void add_columns(
    i64 from, i64 stop, Totals<A>& one, Totals<A>& two, F terms
) {
    typedef Totals<A> T;
    typedef typename T::V V;
    i64 at = from;
    for (; at + LANES<A> <= stop; at += LANES<A>) {
        terms.fetch(at, LANES<A>);
#pragma GCC unroll 8
        for (int v = 0; v < T::count; ++v)
            terms(at + v * T::length, one.vectors[v], two.vectors[v]);
    }
    if (at + T::tail <= stop) {
#pragma GCC unroll 4
        for (int v = 0; v < T::half; ++v)
            terms(at + v * T::length, one.vectors[v], two.vectors[v]);
        at += T::tail;
    }
    if (at == stop) return;
    if (stop - from < T::tail) {
        A lanes[2][T::tail];
        __builtin_memcpy(lanes[0], one.rest, sizeof lanes[0]);
        __builtin_memcpy(lanes[1], two.rest, sizeof lanes[1]);
        for (int l = 0; at < stop; ++at, ++l) terms(at, lanes[0][l], lanes[1][l]);
        __builtin_memcpy(one.rest, lanes[0], sizeof lanes[0]);
        __builtin_memcpy(two.rest, lanes[1], sizeof lanes[1]);
        return;
    }
    // The last 64 bytes, less what was added: numbers one by one would be waited for.
    const A added = static_cast<A>(T::tail - (stop - at));
#pragma GCC unroll 4
    for (int v = 0; v < T::half; ++v) {
        V first = {}, second = {}, index;
        for (int l = 0; l < T::length; ++l) index[l] = static_cast<A>(v * T::length + l);
        terms(stop - T::tail + v * T::length, first, second);
        one.rest[v] += index >= added ? first : V{};
        two.rest[v] += index >= added ? second : V{};
    }
}

// Adds the terms of a column, or of as many as a vector has, to two totals; and asks for
// memory that is needed next.
template <typename F, typename G> struct Terms {
    F add;
    G fetch;

    template <typename V> INLINE void operator()(i64 j, V& one, V& two) const { add(j, one, two); }
};
template <typename F, typename G> Terms(F, G) -> Terms<F, G>;

// Rows whose lines of a channel are read one after another: a cache has few places for lines that are
// multiples of 4 KiB apart.
constexpr i64 NEAR = 5;

// Two sums of each channel: of(row, channel) returns the terms of a line. A lane of a total has so few
// that equal ones round alike.
template <typename A, int TERMS, typename F> INLINE void sum_lines(
    i64 rows, i64 channels, i64 count, double* first, double* second, F of
) {
    typedef Totals<A> T;
    constexpr i64 most = TERMS * LANES<A>;
    for (i64 c = 0; c < channels; ++c) first[c] = second[c] = 0;
    const auto fold = [=](i64 c, T& one, T& two) INLINED {
        const auto sums =
            both_by_halves(one.lanes(), two.lanes(), typename UpTo<T::length>::type());
        first[c] += static_cast<double>(sums[0]);
        second[c] += static_cast<double>(sums[T::length / 2]);
        one = two = {};
    };
    // Adds rows [row, end) of a channel to totals of `held` terms; returns of how many they are then.
    const auto add_rows = [=](i64 c, i64 row, i64 end, i64 held, T& one, T& two) INLINED {
        for (; row < end; ++row) {
            const auto terms = of(row, c);
            for (i64 from = 0; from < count; from += most) {
                const i64 stop = from + most < count ? from + most : count;
                if (held + stop - from > most) {
                    fold(c, one, two);
                    held = 0;
                }
                held += stop - from;
                add_columns(from, stop, one, two, terms);
            }
        }
        return held;
    };
    if (rows == 1) {  // totals stay in registers
        for (i64 c = 0; c < channels; ++c) {
            T one = {}, two = {};
            if (count <= most) add_columns(0, count, one, two, of(0, c));
            else add_rows(c, 0, 1, 0, one, two);
            fold(c, one, two);
        }
        return;
    }
    for (i64 begin = 0; begin < channels; begin += CHANNELS) {
        const i64 end = begin + CHANNELS < channels ? begin + CHANNELS : channels;
        T totals[CHANNELS][2] = {};
        i64 held = 0;
        for (i64 row = 0; row < rows; row += NEAR) {
            i64 holds = 0;
            for (i64 c = begin; c < end; ++c) {
                T one = totals[c - begin][0], two = totals[c - begin][1];
                holds = add_rows(c, row, row + NEAR < rows ? row + NEAR : rows, held, one, two);
                totals[c - begin][0] = one;
                totals[c - begin][1] = two;
            }
            held = holds;
        }
        for (i64 c = begin; c < end; ++c) fold(c, totals[c - begin][0], totals[c - begin][1]);
    }
}

// Asks for what lies so many bytes from these elements: a little at a time, or a processor waits.
enum Cache { L2 = 2, L1 };
template <Cache INTO = L1, typename T> INLINE void fetch(
    const Element<T>* from, i64 count, i64 ahead
) {
    const char* data = reinterpret_cast<const char*>(from) + ahead;
#pragma GCC unroll 4
    for (i64 k = 0; k < count * i64{sizeof(T)}; k += 64) __builtin_prefetch(data + k, 0, INTO);
}

// Writes of(channel)(j, V) to column j of each channel of a row.
template <typename T, typename A, typename F> INLINE void write_row(
    const Lines& to, i64 row, i64 channels, i64 count, bool streamed, F of
) {
    if constexpr (STREAMS<A, T>) {
        Element<T>* own = line<T>(to, row);
        const bool whole = reinterpret_cast<uintptr_t>(own) % sizeof(T) == 0;
        if (streamed && whole && count >= VectorOf<A>::length)
            return stream_lines<A>(channels, count, own, of);
    }
    for (i64 c = 0; c < channels; ++c) write_line<A>(count, line<T>(to, row, c), of(c));
}

// Sums in S.
template <typename S, int TERMS, typename T> INLINE void deviations_in(
    const Lines& x, i64 rows, i64 channels, i64 count, double factor, const double* centre,
    double* first, double* second, i64 ahead
) {
    sum_lines<S, TERMS>(rows, channels, count, first, second, [=](i64 row, i64 channel) INLINED {
        const Element<T>* own = line<T>(x, row, channel);
        const S middle = static_cast<S>(centre[channel]);
        const auto add = [=](i64 j, auto& one, auto& two) INLINED {
            auto deviation = read<Plain<decltype(one)>>(own + j);
            if constexpr (sizeof(T) == 8) deviation *= factor;
            deviation -= middle;
            one += deviation;
            two += deviation * deviation;
        };
        return Terms{add, [=](i64 j, i64 columns) INLINED { fetch(own + j, columns, ahead); }};
    });
}

template <typename T, typename A> void deviations(
    const Lines& x, i64 rows, i64 channels, i64 count, double factor, const double* centre,
    bool wide, double* first, double* second, i64 ahead
) {
    if constexpr (sizeof(T) < sizeof(double))
        if (!wide)
            return deviations_in<float, 16, T>(
                x, rows, channels, count, factor, centre, first, second, ahead
            );
    constexpr int TERMS = sizeof(A) == 8 ? 16 : 64;
    deviations_in<double, TERMS, T>(x, rows, channels, count, factor, centre, first, second, ahead);
}

template <typename T, typename A> void products(
    const Lines& dy, const Lines& x, i64 rows, i64 channels, i64 count, const A* mean,
    const A* inv_std, double* first, double* second, Ahead ahead
) {
    sum_lines<A, 16>(rows, channels, count, first, second, [=](i64 row, i64 channel) INLINED {
        const Element<T> *gradient = line<T>(dy, row, channel), *own = line<T>(x, row, channel);
        const A middle = mean[channel], factor = inv_std[channel];
        const auto add = [=](i64 j, auto& one, auto& two) INLINED {
            typedef Plain<decltype(one)> V;
            const V g = read<V>(gradient + j);
            one += g * ((read<V>(own + j) - middle) * factor);
            two += g;
        };
        return Terms{add, [=](i64 j, i64 columns) INLINED {
            fetch(gradient + j, columns, ahead.dy);
            fetch(own + j, columns, ahead.x);
        }};
    });
}

template <typename V, typename N> INLINE V derivative(
    V dy, V x, N mean, N inv_std, N scale, N of_product, N of_w, N outer
) {
    return (dy * scale - ((x - mean) * inv_std * of_product + of_w)) * outer;
}

template <bool FETCHES, typename T, typename A> INLINE void normalise_lines(
    const Lines& x, i64 rows, i64 channels, i64 count, const A* mean, const A* factor,
    const A* offset, const Lines& y, bool streamed, i64 ahead
) {
    for (i64 r = 0; r < rows; ++r)
        write_row<T, A>(y, r, channels, count, streamed, [=](i64 c) INLINED {
            const Element<T>* own = line<T>(x, r, c);
            const A mean_ = mean[c], factor_ = factor[c], offset_ = offset[c];
            return [=](i64 j, auto kind) INLINED {
                typedef decltype(kind) V;
                if constexpr (FETCHES && sizeof(V) > sizeof(A)) fetch(own + j, LENGTH<V>, ahead);
                return (read<V>(own + j) - mean_) * factor_ + offset_;
            };
        });
}

template <typename T, typename A> void normalise(
    const Lines& x, i64 rows, i64 channels, i64 count, const A* mean, const A* factor,
    const A* offset, const Lines& y, bool streamed, i64 ahead
) {
    const auto run = ahead ? normalise_lines<true, T, A> : normalise_lines<false, T, A>;
    run(x, rows, channels, count, mean, factor, offset, y, streamed, ahead);
}

enum class Fetches { NOTHING, NEXT_ROW, NEXT_GROUP };

template <Fetches FETCHES, typename T, typename A> INLINE void differentiate_lines(
    const Lines& dy, const Lines& x, i64 rows, i64 channels, i64 count, const A* mean,
    const A* inv_std, const A* scale, const A* of_product, const A* of_w, const A* outer,
    const Lines& dx, bool streamed, Ahead ahead
) {
    for (i64 r = 0; r < rows; ++r)
        write_row<T, A>(dx, r, channels, count, streamed, [=](i64 c) INLINED {
            const Element<T> *gradient = line<T>(dy, r, c), *own = line<T>(x, r, c);
            const A mean_ = mean[c], inv_std_ = inv_std[c], scale_ = scale[c];
            const A of_product_ = of_product[c], of_w_ = of_w[c], outer_ = outer[c];
            return [=](i64 j, auto kind) INLINED {
                typedef decltype(kind) V;
                constexpr bool one = sizeof(V) == sizeof(A);
                if constexpr (FETCHES == Fetches::NEXT_ROW && !one)
                    fetch(own + j, LENGTH<V>, ahead.x);
                if constexpr (FETCHES == Fetches::NEXT_GROUP && !one) {
                    fetch<L2>(gradient + j, LENGTH<V>, ahead.dy);
                    fetch<L2>(own + j, LENGTH<V>, ahead.x);
                }
                return derivative(
                    read<V>(gradient + j), read<V>(own + j), mean_, inv_std_, scale_, of_product_,
                    of_w_, outer_
                );
            };
        });
}

template <typename T, typename A> void differentiate(
    const Lines& dy, const Lines& x, i64 rows, i64 channels, i64 count, const A* mean,
    const A* inv_std, const A* scale, const A* of_product, const A* of_w, const A* outer,
    const Lines& dx, bool streamed, Ahead ahead
) {
    const auto run = ahead.dy ? differentiate_lines<Fetches::NEXT_GROUP, T, A>
        : ahead.x             ? differentiate_lines<Fetches::NEXT_ROW, T, A>
                              : differentiate_lines<Fetches::NOTHING, T, A>;
    run(dy, x, rows, channels, count, mean, inv_std, scale, of_product, of_w, outer, dx, streamed, ahead);
}

template <typename T, typename A> void multiply(
    const Lines& dy, i64 rows, i64 channels, i64 count, const A* outer, const Lines& dx,
    bool streamed
) {
    for (i64 r = 0; r < rows; ++r)
        write_row<T, A>(dx, r, channels, count, streamed, [=](i64 c) INLINED {
            const Element<T>* gradient = line<T>(dy, r, c);
            const A outer_ = outer[c];
            return [=](i64 j, auto kind) INLINED {
                return read<decltype(kind)>(gradient + j) * outer_;
            };
        });
}

// Adds terms(row, column, one, two) of few rows, summed in A, to two sums of each column.
template <typename A, typename F> INLINE void add_terms_of_rows(
    i64 rows, i64 count, double* first, double* second, F terms
) {
    if constexpr (sizeof(A) == sizeof(double)) {
        add_rows<double>(rows, count, first, second, terms);
    } else {
        A one[COLUMNS], two[COLUMNS];
        for (i64 j = 0; j < count; ++j) one[j] = two[j] = 0;
        add_rows<A>(rows, count, one, two, terms);
        for (i64 j = 0; j < count; ++j) {
            first[j] += static_cast<double>(one[j]);
            second[j] += static_cast<double>(two[j]);
        }
    }
}

template <typename S, typename T> INLINE void deviations_of_rows_in(
    const Lines& x, i64 rows, i64 count, double factor, const double* centre, double* first,
    double* second, i64 ahead
) {
    S middle[COLUMNS];
    for (i64 j = 0; j < count; ++j) middle[j] = static_cast<S>(centre[j]);
    const S* const own = middle;
    const auto add = [=](i64 r, i64 j, auto& one, auto& two) INLINED {
        typedef Plain<decltype(one)> V;
        V deviation = read<V>(line<T>(x, r) + j);
        if constexpr (sizeof(T) == 8) deviation *= factor;
        deviation -= at<V>(own + j);
        one += deviation;
        two += deviation * deviation;
    };
    add_terms_of_rows<S>(rows, count, first, second, Terms{add, [=](i64 r, i64 j, i64 columns) INLINED {
        if (ahead) fetch<L2>(line<T>(x, r) + j, columns, ahead);
    }});
}

template <typename T, typename A> void deviations_of_rows(
    const Lines& x, i64 rows, i64 count, double factor, const double* centre, bool wide,
    double* first, double* second, i64 ahead
) {
    if constexpr (sizeof(T) == 2)
        if (!wide)
            return deviations_of_rows_in<float, T>(
                x, rows, count, factor, centre, first, second, ahead
            );
    deviations_of_rows_in<double, T>(x, rows, count, factor, centre, first, second, ahead);
}

template <typename T, typename A> void products_of_rows(
    const Lines& dy, const Lines& x, i64 rows, i64 count, const A* mean, const A* inv_std,
    double* first, double* second
) {
    const auto add = [=](i64 r, i64 j, auto& one, auto& two) INLINED {
        typedef Plain<decltype(one)> V;
        const V g = read<V>(line<T>(dy, r) + j);
        one += g * ((read<V>(line<T>(x, r) + j) - at<V>(mean + j)) * at<V>(inv_std + j));
        two += g;
    };
    // The next rows: a processor foresees those alone that are read as they lie, in one strip.
    const bool fetches = count > STRIP<A>;
    const i64 ahead_x = rows * x.stride, ahead_dy = rows * dy.stride;
    add_terms_of_rows<A>(rows, count, first, second, Terms{add, [=](i64 r, i64 j, i64 columns) INLINED {
        if (!fetches) return;
        fetch<L2>(line<T>(x, r) + j, columns, ahead_x);
        fetch<L2>(line<T>(dy, r) + j, columns, ahead_dy);
    }});
}

template <typename T, typename A> void normalise_rows(
    const Lines& x, i64 rows, i64 count, const A* mean, const A* factor, const A* offset,
    const Lines& y
) {
    for (i64 r = 0; r < rows; ++r) {
        const Element<T>* row = line<T>(x, r);
        write_columns<A>(count, line<T>(y, r), [=](i64 j, auto kind) INLINED {
            typedef decltype(kind) V;
            return (read<V>(row + j) - at<V>(mean + j)) * at<V>(factor + j) + at<V>(offset + j);
        });
    }
}

template <typename T, typename A> void differentiate_rows(
    const Lines& dy, const Lines& x, i64 rows, i64 count, const A* mean, const A* inv_std,
    const A* scale, const A* of_product, const A* of_w, const A* outer, const Lines& dx
) {
    for (i64 r = 0; r < rows; ++r) {
        const Element<T> *gradient = line<T>(dy, r), *row = line<T>(x, r);
        write_columns<A>(count, line<T>(dx, r), [=](i64 j, auto kind) INLINED {
            typedef decltype(kind) V;
            return derivative(
                read<V>(gradient + j), read<V>(row + j), at<V>(mean + j), at<V>(inv_std + j),
                at<V>(scale + j), at<V>(of_product + j), at<V>(of_w + j), at<V>(outer + j)
            );
        });
    }
}

template <typename T, typename A> void multiply_rows(
    const Lines& dy, i64 rows, i64 count, const A* outer, const Lines& dx
) {
    for (i64 r = 0; r < rows; ++r) {
        const Element<T>* gradient = line<T>(dy, r);
        write_columns<A>(count, line<T>(dx, r), [=](i64 j, auto kind) INLINED {
            typedef decltype(kind) V;
            return read<V>(gradient + j) * at<V>(outer + j);
        });
    }
}

// Together with what reads a result afterwards, to write it past the caches takes no longer from here on:
// a processor whose vectors are lines gains earlier.
#ifdef __AVX512F__
constexpr i64 STREAMED = 1 << 23;
#else
constexpr i64 STREAMED = 1 << 24;
#endif

template <typename T, typename A> constexpr ChannelKernels<A> kernels = {
    STREAMED,
    deviations<T, A>,
    products<T, A>,
    normalise<T, A>,
    differentiate<T, A>,
    multiply<T, A>,
    deviations_of_rows<T, A>,
    products_of_rows<T, A>,
    normalise_rows<T, A>,
    differentiate_rows<T, A>,
    multiply_rows<T, A>,
};

const ChannelKernels<float> channel_kernels_f32[3] = {
    kernels<f16, float>, kernels<bf16, float>, kernels<float, float>,
};
const ChannelKernels<double> channel_kernels_f64 = kernels<double, double>;

}  // namespace ISA
