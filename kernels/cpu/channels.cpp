// Norms over channels on a CPU, for one instruction set: ISA names it, and the namespace.
//
// Bits are the same for each instruction set: sums have as many totals, whatever a vector holds, and
// nothing is fused. channels.h has the formulas.

#include "channels.h"

#include "sums.h"

// Loops whose arrays may be one array, element by element, and do not overlap otherwise.
#define INDEPENDENT _Pragma("GCC ivdep")

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
            const Element<T>* source = reinterpret_cast<Element<T>*>(at);
            INDEPENDENT
            for (i64 j = 0; j < run; ++j) own[j] = widen(source[j].value);
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
            Element<T>* target = reinterpret_cast<Element<T>*>(at);
            INDEPENDENT
            for (i64 j = 0; j < run; ++j) narrow(own[j], target[j].value);
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

template <typename A> INLINE A* line(Lines lines, i64 row) {
    return reinterpret_cast<A*>(lines.data + row * lines.stride);
}

// Elements behind a line with gaps are those of the next channel, which no processor foresees.
template <typename A> INLINE void expect(Lines lines, i64 row, i64 count) {
    const i64 bytes = count * i64{sizeof(A)};
    if (lines.stride == bytes || bytes > 2048) return;
    const char* next = lines.data + row * lines.stride + bytes;
    for (i64 k = 0; k < bytes; k += 64) __builtin_prefetch(next + k);
}

// Totals of a sum: whatever a vector holds, elements LANES apart have one total.
template <typename A> struct Totals {
    typedef typename VectorOf<A>::type V;
    static constexpr int length = VectorOf<A>::length, count = LANES<A> / length;
    static constexpr int tail = 64 / sizeof(A);  // elements of the longest vector

    V vectors[count];
    A rest[tail];  // of elements beyond the last of those

    INLINE void clear() {
#pragma GCC unroll 8
        for (int v = 0; v < count; ++v) vectors[v] = V{};
        for (int l = 0; l < tail; ++l) rest[l] = 0;
    }

    INLINE double sum() const {
        A lanes[LANES<A>];
        __builtin_memcpy(lanes, vectors, sizeof lanes);
        for (int l = 0; l < tail; ++l) lanes[l] += lanes[l + tail];
        for (int l = 0; l < tail; ++l) lanes[l] += rest[l];
#pragma GCC unroll 4
        for (int half = tail / 2; half > 0; half /= 2)
#pragma GCC unroll 8
            for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
        return static_cast<double>(lanes[0]);
    }
};

// Two sums over lines: add(row, column, first, second) adds the terms of a column, or of as many as
// a vector has, to two totals. So few terms have one total that equal ones round alike.
template <typename A, typename F> INLINE void sum_lines(
    i64 rows, i64 count, double* sums, F add
) {
    typedef Totals<A> T;
    constexpr i64 most = 16 * LANES<A>;
    sums[0] = sums[1] = 0;
    T first, second;
    first.clear();
    second.clear();
    i64 held = 0;
    for (i64 row = 0; row < rows; ++row) {
        for (i64 at = 0; at < count;) {
            const i64 stop = at + most < count ? at + most : count;
            if (held + stop - at > most) {
                sums[0] += first.sum();
                sums[1] += second.sum();
                first.clear();
                second.clear();
                held = 0;
            }
            held += stop - at;
            for (; at + LANES<A> <= stop; at += LANES<A>)
#pragma GCC unroll 8
                for (int v = 0; v < T::count; ++v)
                    add(row, at + v * T::length, first.vectors[v], second.vectors[v]);
            if (at + T::tail <= stop) {
#pragma GCC unroll 4
                for (int v = 0; v < T::count / 2; ++v)
                    add(row, at + v * T::length, first.vectors[v], second.vectors[v]);
                at += T::tail;
            }
            for (int l = 0; at < stop; ++at, ++l) add(row, at, first.rest[l], second.rest[l]);
        }
    }
    sums[0] += first.sum();
    sums[1] += second.sum();
}

template <typename A> void deviations(
    Lines x, i64 rows, i64 count, double factor, double centre, double* sums
) {
    sum_lines<double>(rows, count, sums, [=](i64 row, i64 j, auto& first, auto& second) {
        typedef Plain<decltype(first)> V;
        if (j == 0) expect<A>(x, row, count);
        V deviation = at<V>(line<A>(x, row) + j);
        if (sizeof(A) == 8) deviation *= factor;
        deviation -= centre;
        first += deviation;
        second += deviation * deviation;
    });
}

template <typename A> void products(
    Lines dy, Lines x, i64 rows, i64 count, A mean, A inv_std, double* sums
) {
    sum_lines<A>(rows, count, sums, [=](i64 row, i64 j, auto& first, auto& second) {
        typedef Plain<decltype(first)> V;
        if (j == 0) {
            expect<A>(dy, row, count);
            expect<A>(x, row, count);
        }
        const V g = at<V>(line<A>(dy, row) + j);
        first += g * ((at<V>(line<A>(x, row) + j) - mean) * inv_std);
        second += g;
    });
}

template <typename A> void normalise(
    Lines x, i64 rows, i64 count, A high, A low, A factor, A bias, Lines y
) {
    for (i64 r = 0; r < rows; ++r) {
        const A* row = line<A>(x, r);
        A* to = line<A>(y, r);
        expect<A>(x, r, count);
        INDEPENDENT
        for (i64 j = 0; j < count; ++j) to[j] = (row[j] - high - low) * factor + bias;
    }
}

template <typename A> INLINE A derivative(
    A dy, A x, A mean, A inv_std, A scale, A of_product, A of_w, A outer
) {
    return (dy * scale - ((x - mean) * inv_std * of_product + of_w)) * outer;
}

template <typename A> void differentiate(
    Lines dy, Lines x, i64 rows, i64 count, A mean, A inv_std, A scale, A of_product, A of_w,
    A outer, Lines dx
) {
    for (i64 r = 0; r < rows; ++r) {
        const A *gradient = line<A>(dy, r), *row = line<A>(x, r);
        A* to = line<A>(dx, r);
        INDEPENDENT
        for (i64 j = 0; j < count; ++j)
            to[j] =
                derivative(gradient[j], row[j], mean, inv_std, scale, of_product, of_w, outer);
    }
}

template <typename A> void multiply(Lines dy, i64 rows, i64 count, A outer, Lines dx) {
    for (i64 r = 0; r < rows; ++r) {
        const A* gradient = line<A>(dy, r);
        A* to = line<A>(dx, r);
        INDEPENDENT
        for (i64 j = 0; j < count; ++j) to[j] = gradient[j] * outer;
    }
}

template <typename A> void total(const double* values, const A* weights, i64 count, double* sums) {
    sum_lines<double>(1, count, sums, [=](i64, i64 j, auto& first, auto& second) {
        typedef Plain<decltype(first)> V;
        const V value = at<V>(values + j);
        first += value;
        second += value * at<V>(weights + j);
    });
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
    total<A>,
    deviations_of_rows<A>,
    products_of_rows<A>,
    normalise_rows<A>,
    differentiate_rows<A>,
    multiply_rows<A>,
};

const ChannelKernels<float> channel_kernels_f32 = kernels<float>;
const ChannelKernels<double> channel_kernels_f64 = kernels<double>;

}  // namespace ISA
