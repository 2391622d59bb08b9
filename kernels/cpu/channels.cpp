// Norms over channels on a CPU, for one instruction set: ISA names it, and the namespace.
//
// Bits are the same for each instruction set: sums have as many totals, whatever a vector holds, and
// nothing is fused. channels.h has the formulas.

#include "channels.h"

#include "sums.h"

namespace ISA {

// Calls visit(address, stride, count, which) for each run of elements that one stride leads through.
template <typename F> INLINE void for_each_run(
    char* data, const Axes& axes, i64 from, i64 count, F visit
) {
    const int last = axes.count - 1;
    const Axis inner = last < 0 ? Axis{1, 0} : axes.at[last];
    i64 index[MOST_AXES], rest = from / inner.length, at = from % inner.length;
    for (int axis = last - 1; axis >= 0; --axis) {
        index[axis] = rest % axes.at[axis].length;
        rest /= axes.at[axis].length;
        data += index[axis] * axes.at[axis].stride;
    }
    for (i64 done = 0; done < count; at = 0) {
        const i64 left = inner.length - at, run = left < count - done ? left : count - done;
        visit(data + at * inner.stride, inner.stride, run, done);
        done += run;
        for (int axis = last - 1; axis >= 0; --axis) {
            data += axes.at[axis].stride;
            if (++index[axis] < axes.at[axis].length) break;
            data -= axes.at[axis].stride * axes.at[axis].length;
            index[axis] = 0;
        }
    }
}

template <typename T, typename A> void load_all(
    char* data, const Axes& axes, i64 from, i64 count, A* to
) {
    for_each_run(data, axes, from, count, [=](char* at, i64 stride, i64 run, i64 done) {
        A* own = to + done;
        if (stride == sizeof(T)) {
            widen_run(reinterpret_cast<Element<T>*>(at), run, reinterpret_cast<Element<A>*>(own));
        } else {
            for (i64 j = 0; j < run; ++j)
                own[j] = widen(reinterpret_cast<Element<T>*>(at + j * stride)->value);
        }
    });
}

template <typename T, typename A> void store_all(
    const A* values, i64 count, char* data, const Axes& axes, i64 from
) {
    for_each_run(data, axes, from, count, [=](char* at, i64 stride, i64 run, i64 done) {
        const A* own = values + done;
        if (stride == sizeof(T)) {
            narrow_run(own, run, reinterpret_cast<Element<T>*>(at));
        } else {
            for (i64 j = 0; j < run; ++j)
                narrow(own[j], reinterpret_cast<Element<T>*>(at + j * stride)->value);
        }
    });
}

template <typename A> void load(
    Dtype dtype, char* data, const Axes& axes, i64 from, i64 count, A* to
) {
    const auto run = sizeof(A) == 8 ? load_all<A, A>
        : dtype == F16              ? load_all<f16, A>
        : dtype == BF16             ? load_all<bf16, A>
                                    : load_all<A, A>;
    run(data, axes, from, count, to);
}

template <typename A> void store(
    Dtype dtype, const A* values, i64 count, char* data, const Axes& axes, i64 from
) {
    const auto run = sizeof(A) == 8 ? store_all<A, A>
        : dtype == F16              ? store_all<f16, A>
        : dtype == BF16             ? store_all<bf16, A>
                                    : store_all<A, A>;
    run(values, count, data, axes, from);
}

template <typename V, typename A> INLINE V at(const A* from) {
    return read<V>(reinterpret_cast<const Element<A>*>(from));
}

template <typename A> INLINE A* line(Lines lines, i64 row, i64 channel = 0) {
    return reinterpret_cast<A*>(lines.data + row * lines.stride + channel * lines.channel);
}

INLINE float sum_of(const float* lanes) { return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]); }
INLINE double sum_of(const double* lanes) { return lanes[0] + lanes[1]; }

// By halves: lanes that are half a vector apart, down to 16 bytes.
template <typename A, int BYTES> INLINE A sum_of_vector(const A* lanes) {
    if constexpr (BYTES > 16) {
        typedef A Half __attribute__((vector_size(BYTES / 2)));
        Half halves[2];
        __builtin_memcpy(halves, lanes, sizeof halves);
        halves[0] += halves[1];
        return sum_of_vector<A, BYTES / 2>(reinterpret_cast<const A*>(halves));
    } else {
        return sum_of(lanes);
    }
}

// Totals of a sum, the same whatever a vector holds: of elements LANES apart, and of those that are
// beyond the last 64 bytes of a line.
template <typename A> struct Totals {
    typedef typename VectorOf<A>::type V;
    static constexpr int length = VectorOf<A>::length, count = LANES<A> / length, half = count / 2;
    static constexpr int tail = 64 / sizeof(A);

    V vectors[count], rest[half];

    INLINE double sum() const {
        V folded[half];
        for (int v = 0; v < half; ++v) folded[v] = vectors[v] + vectors[v + half] + rest[v];
        return static_cast<double>(sum_of_vector<A, 64>(reinterpret_cast<const A*>(folded)));
    }
};

// Adds the terms of columns [from, stop) of a line to two totals.
template <typename A, typename F> INLINE void add_columns(
    i64 from, i64 stop, Totals<A>& one, Totals<A>& two, F terms
) {
    typedef Totals<A> T;
    typedef typename T::V V;
    i64 at = from;
    for (; at + LANES<A> <= stop; at += LANES<A>)
#pragma GCC unroll 8
        for (int v = 0; v < T::count; ++v)
            terms(at + v * T::length, one.vectors[v], two.vectors[v]);
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

// Two sums of each channel: add(row, channel) returns what adds the terms of a column, or of as many
// as a vector has, to two totals. So few terms have one total that equal ones round alike.
template <typename A, typename F> INLINE void sum_lines(
    i64 rows, i64 channels, i64 count, double* first, double* second, F add
) {
    typedef Totals<A> T;
    constexpr i64 most = 16 * LANES<A>;
    for (i64 c = 0; c < channels; ++c) first[c] = second[c] = 0;
    if (rows == 1 && count <= most) {  // totals stay in registers
        for (i64 c = 0; c < channels; ++c) {
            T one = {}, two = {};
            add_columns(0, count, one, two, add(0, c));
            first[c] += one.sum();
            second[c] += two.sum();
        }
        return;
    }
    for (i64 begin = 0; begin < channels; begin += CHANNELS) {
        const i64 end = begin + CHANNELS < channels ? begin + CHANNELS : channels;
        T totals[CHANNELS][2];
        i64 held = most;
        const auto fold = [&]() __attribute__((always_inline)) {
            for (i64 c = begin; c < end; ++c) {
                first[c] += totals[c - begin][0].sum();
                second[c] += totals[c - begin][1].sum();
            }
        };
        bool any = false;
        for (i64 row = 0; row < rows; ++row) {
            for (i64 from = 0; from < count; from += most) {
                const i64 stop = from + most < count ? from + most : count;
                if (held + stop - from > most) {
                    if (any) fold();
                    __builtin_memset(totals, 0, (end - begin) * sizeof totals[0]);
                    held = 0;
                }
                any = true;
                held += stop - from;
                for (i64 c = begin; c < end; ++c) {
                    T one = totals[c - begin][0], two = totals[c - begin][1];
                    add_columns(from, stop, one, two, add(row, c));
                    totals[c - begin][0] = one;
                    totals[c - begin][1] = two;
                }
            }
        }
        fold();
    }
}

template <typename A> void deviations(
    Lines x, i64 rows, i64 channels, i64 count, double factor, const double* centre,
    double* first, double* second
) {
    sum_lines<double>(rows, channels, count, first, second, [=](i64 row, i64 channel) {
        const A* own = line<A>(x, row, channel);
        const double middle = centre[channel];
        return [=](i64 j, auto& one, auto& two) __attribute__((always_inline)) {
            typedef Plain<decltype(one)> V;
            V deviation = at<V>(own + j);
            if (sizeof(A) == 8) deviation *= factor;
            deviation -= middle;
            one += deviation;
            two += deviation * deviation;
        };
    });
}

template <typename A> void products(
    Lines dy, Lines x, i64 rows, i64 channels, i64 count, const A* mean, const A* inv_std,
    double* first, double* second
) {
    sum_lines<A>(rows, channels, count, first, second, [=](i64 row, i64 channel) {
        const A *gradient = line<A>(dy, row, channel), *own = line<A>(x, row, channel);
        const A middle = mean[channel], factor = inv_std[channel];
        return [=](i64 j, auto& one, auto& two) __attribute__((always_inline)) {
            typedef Plain<decltype(one)> V;
            const V g = at<V>(gradient + j);
            one += g * ((at<V>(own + j) - middle) * factor);
            two += g;
        };
    });
}

template <typename A> INLINE A derivative(
    A dy, A x, A mean, A inv_std, A scale, A of_product, A of_w, A outer
) {
    return (dy * scale - ((x - mean) * inv_std * of_product + of_w)) * outer;
}

template <typename A> void normalise(
    Lines x, i64 rows, i64 channels, i64 count, const A* high, const A* low, const A* factor,
    const A* bias, Lines y
) {
    for (i64 r = 0; r < rows; ++r)
        for (i64 c = 0; c < channels; ++c) {
            const A* own = line<A>(x, r, c);
            const A high_ = high[c], low_ = low[c], factor_ = factor[c], bias_ = bias[c];
            A* to = line<A>(y, r, c);
            INDEPENDENT
            for (i64 j = 0; j < count; ++j) to[j] = (own[j] - high_ - low_) * factor_ + bias_;
        }
}

template <typename A> void differentiate(
    Lines dy, Lines x, i64 rows, i64 channels, i64 count, const A* mean, const A* inv_std,
    const A* scale, const A* of_product, const A* of_w, const A* outer, Lines dx
) {
    for (i64 r = 0; r < rows; ++r)
        for (i64 c = 0; c < channels; ++c) {
            const A *gradient = line<A>(dy, r, c), *own = line<A>(x, r, c);
            const A mean_ = mean[c], inv_std_ = inv_std[c], scale_ = scale[c];
            const A of_product_ = of_product[c], of_w_ = of_w[c], outer_ = outer[c];
            A* to = line<A>(dx, r, c);
            INDEPENDENT
            for (i64 j = 0; j < count; ++j)
                to[j] = derivative(
                    gradient[j], own[j], mean_, inv_std_, scale_, of_product_, of_w_, outer_
                );
        }
}

template <typename A> void multiply(
    Lines dy, i64 rows, i64 channels, i64 count, const A* outer, Lines dx
) {
    for (i64 r = 0; r < rows; ++r)
        for (i64 c = 0; c < channels; ++c) {
            const A *gradient = line<A>(dy, r, c), outer_ = outer[c];
            A* to = line<A>(dx, r, c);
            INDEPENDENT
            for (i64 j = 0; j < count; ++j) to[j] = gradient[j] * outer_;
        }
}

template <typename A> void deviations_of_rows(
    Lines x, i64 rows, i64 count, double factor, const double* centre, double* first,
    double* second
) {
    for (i64 r = 0; r < rows; ++r) {
        const A* row = line<A>(x, r);
        INDEPENDENT
        for (i64 j = 0; j < count; ++j) {
            double deviation = row[j];
            if (sizeof(A) == 8) deviation *= factor;
            deviation -= centre[j];
            first[j] += deviation;
            second[j] += deviation * deviation;
        }
    }
}

template <typename A> void products_of_rows(
    Lines dy, Lines x, i64 rows, i64 count, const A* mean, const A* inv_std, double* first,
    double* second
) {
    A product[COLUMNS], plain[COLUMNS];
    for (i64 j = 0; j < count; ++j) product[j] = plain[j] = 0;
    for (i64 r = 0; r < rows; ++r) {
        const A *gradient = line<A>(dy, r), *row = line<A>(x, r);
        INDEPENDENT
        for (i64 j = 0; j < count; ++j) {
            product[j] += gradient[j] * ((row[j] - mean[j]) * inv_std[j]);
            plain[j] += gradient[j];
        }
    }
    for (i64 j = 0; j < count; ++j) {
        first[j] += static_cast<double>(product[j]);
        second[j] += static_cast<double>(plain[j]);
    }
}

template <typename A> void normalise_rows(
    Lines x, i64 rows, i64 count, const A* high, const A* low, const A* factor, const A* bias,
    Lines y
) {
    for (i64 r = 0; r < rows; ++r) {
        const A* row = line<A>(x, r);
        A* to = line<A>(y, r);
        INDEPENDENT
        for (i64 j = 0; j < count; ++j)
            to[j] = (row[j] - high[j] - low[j]) * factor[j] + bias[j];
    }
}

template <typename A> void differentiate_rows(
    Lines dy, Lines x, i64 rows, i64 count, const A* mean, const A* inv_std, const A* scale,
    const A* of_product, const A* of_w, const A* outer, Lines dx
) {
    for (i64 r = 0; r < rows; ++r) {
        const A *gradient = line<A>(dy, r), *row = line<A>(x, r);
        A* to = line<A>(dx, r);
        INDEPENDENT
        for (i64 j = 0; j < count; ++j)
            to[j] = derivative(
                gradient[j], row[j], mean[j], inv_std[j], scale[j], of_product[j], of_w[j],
                outer[j]
            );
    }
}

template <typename A> void multiply_rows(
    Lines dy, i64 rows, i64 count, const A* outer, Lines dx
) {
    for (i64 r = 0; r < rows; ++r) {
        const A* gradient = line<A>(dy, r);
        A* to = line<A>(dx, r);
        INDEPENDENT
        for (i64 j = 0; j < count; ++j) to[j] = gradient[j] * outer[j];
    }
}

template <typename A> constexpr ChannelKernels<A> kernels = {
    load<A>,
    store<A>,
    deviations<A>,
    products<A>,
    normalise<A>,
    differentiate<A>,
    multiply<A>,
    deviations_of_rows<A>,
    products_of_rows<A>,
    normalise_rows<A>,
    differentiate_rows<A>,
    multiply_rows<A>,
};

const ChannelKernels<float> channel_kernels_f32 = kernels<float>;
const ChannelKernels<double> channel_kernels_f64 = kernels<double>;

}  // namespace ISA
