// Norms over rows on a CPU, for one instruction set: ISA names it, and the namespace.
//
// With xhat = (x - mean) * inv_std (RMS norm: x * inv_std; from the output: (y - bias) / scale) and
// w = dy * scale, means over a row:
//
//   forward    y  = xhat * scale + bias
//   gradient   dx = inv_std * (w - mean(w) - xhat * mean(w * xhat)) + ds
//   inverse    x  = (y - bias) / scale / inv_std + mean
//
// and of an RMS norm with an activated gate a, whose derivative is a':
//
//   before the gate    xhat = x * inv_std      u = dy * a   y = xhat * scale * a
//   behind the gate    xhat = x * a * inv_std  u = dy       y = xhat * scale
//   gradient           d = inv_std * (u * scale - xhat * mean(u * scale * xhat))
//   before the gate    dx = d       dgate = dy * xhat * scale * a'
//   behind the gate    dx = d * a   dgate = d * x * a'
//
// Bits are the same for each instruction set: sums have as many totals, whatever a vector holds, and
// nothing is fused. A row's results depend on that row alone.

#include <type_traits>

#include "rows.h"

#include "gates.h"
#include "sums.h"

namespace ISA {

// Columns of a row of dtype T in the dtype of the computation.
template <typename T, typename A> void widen_all(
    char* data, const Axes& axes, i64 from, i64 count, Element<A>* to
) {
    if (has_no_gaps(axes, sizeof(T))) {
        widen_run(reinterpret_cast<Element<T>*>(data) + from, count, to);
    } else {
        for_each(data, axes, from, count, [=](char* source, i64 j) {
            to[j].value = widen(reinterpret_cast<Element<T>*>(source)->value);
        });
    }
}

// The same the other way: numbers from a room, as columns of a row that is at `data`.
template <typename T, typename A> void narrow_all(
    const Element<A>* from, const Axes& columns, char* data, i64 first, i64 count
) {
    if (has_no_gaps(columns, sizeof(T))) {
        narrow_run(from, count, reinterpret_cast<Element<T>*>(data) + first);
    } else {
        for_each(data, columns, first, count, [=](char* to, i64 j) {
            narrow(from[j].value, *reinterpret_cast<Element<T>*>(to));
        });
    }
}

template <typename A> void narrow_columns(
    Dtype dtype, const void* room, const Axes& columns, char* data, i64 first, i64 count
) {
    const auto run = dtype == F16 ? narrow_all<f16, A>
        : dtype == BF16           ? narrow_all<bf16, A>
        : dtype == F32            ? narrow_all<float, A>
                                  : narrow_all<double, A>;
    run(static_cast<const Element<A>*>(room), columns, data, first, count);
}

// Those of bfloat16 columns that are read where they lie are paired.
template <typename A> void widen_parameter(
    const Parameter& parameter, i64 from, i64 count, bool pairs, void* room
) {
    Element<A>* to = static_cast<Element<A>*>(room);
    const A value = static_cast<A>(parameter.value);
    if (!parameter.array) {
        for (i64 j = 0; j < count; ++j) to[j].value = value;
    } else {
        const auto run = parameter.dtype == F16 ? widen_all<f16, A>
            : parameter.dtype == BF16           ? widen_all<bf16, A>
            : parameter.dtype == F32            ? widen_all<float, A>
                                                : widen_all<double, A>;
        char* const data = row_of(*parameter.array, parameter.sample);
        run(data, parameter.array->columns, from, count, to);
        // An offset of 0 is not added: not even the sign of -0 changes.
        if (value != 0)
            for (i64 j = 0; j < count; ++j) to[j].value += value;
    }
    if constexpr (sizeof(A) == sizeof(float))
        if (pairs) {
            for (i64 j = 0; j < count; ++j) to[j].value = as_number<A>(to[j].value);
            pair<true>(count, to);
        }
}

constexpr i64 AHEAD = 1 << 13;  // bytes

// A window's columns of a call's arrays: where they lie, or in a room of a thread's scratch.
template <typename A> class Window {
public:
    Window(const Rows& rows, i64 from, char* scratch)
        : rows_(rows),
          scratch_(scratch),
          from(from),
          count(from + rows.window < rows.width ? rows.window : rows.width - from) {}

    // Columns of parameters; those of long rows are widened each time.
    const Element<A>* scale() const { return parameter(rows_.whole_scale, rows_.scale, 5); }
    const Element<A>* bias() const { return parameter(rows_.whole_bias, rows_.bias, 6); }

    const Element<A>* input(const Array* array, i64 row, int room) const {
        if (there(array)) return own(array, row);
        const auto run = sizeof(A) == 8 ? widen_all<A, A>
            : rows_.dtype == F16        ? widen_all<f16, A>
            : rows_.dtype == BF16       ? widen_all<bf16, A>
                                        : widen_all<A, A>;
        run(row_of(*array, row), array->columns, from, count, at(room));
        return at(room);
    }

    // The same in the dtype of memory, which has no gaps, if that is another one.
    template <typename T> INLINE const Element<T>* read(const Array* array, i64 row, int room) const {
        if constexpr (std::is_same_v<T, A>) return input(array, row, room);
        else return reinterpret_cast<const Element<T>*>(row_of(*array, row)) + from;
    }

    // Writes value(j, V) to each column j, of rows that are read as a dtype T: where it lies, or by
    // way of room 0, whose columns `value` may read.
    template <typename T = A, typename F> INLINE void write(const Array* array, i64 row, F value) const {
        if constexpr (std::is_same_v<T, A>) {
            Element<A>* to = there(array) ? own(array, row) : at(0);
            write_columns<A>(count, to, value);
            if (!there(array)) store(array, row, to);
        } else {
            Element<T>* to = reinterpret_cast<Element<T>*>(row_of(*array, row)) + from;
            write_line<A>(count, to, value);
        }
    }

    // The same, past the caches if they can be.
    template <typename T, typename F> INLINE void write(
        const Array* array, i64 row, F value, StreamedRows<A, T>& past_caches
    ) const {
        if constexpr (STREAMS<A, T>) {
            Element<T>* to = reinterpret_cast<Element<T>*>(row_of(*array, row)) + from;
            const bool whole = reinterpret_cast<uintptr_t>(to) % sizeof(T) == 0;
            if (rows_.streamed && whole && lies_there<T>(array) && count >= LINE_OF<T>)
                return past_caches.write_row(count, to, value);
        }
        write<T>(array, row, value);
    }

    // True if columns of dtype T are read and written where they lie.
    template <typename T> bool lies_there(const Array* array) const {
        return !std::is_same_v<T, A> || there(array);
    }

    // Writes columns that are in a room.
    void store(const Array* array, i64 row, const Element<A>* room) const {
        narrow_columns<A>(rows_.dtype, room, array->columns, row_of(*array, row), from, count);
    }

    // The last result of `read`, if no other window has the memory now.
    template <typename T> INLINE const Element<T>* again(const Array* array, i64 row, int room) const {
        if constexpr (std::is_same_v<T, A>)
            if (!there(array) && count == rows_.width) return at(room);
        return read<T>(array, row, room);
    }

    Element<A>* at(int room) const {
        return reinterpret_cast<Element<A>*>(scratch_ + room * rows_.window * i64{sizeof(double)});
    }

private:
    const Element<A>* parameter(const void* whole, const Parameter& parameter, int room) const {
        if (whole) return static_cast<const Element<A>*>(whole);
        widen_parameter<A>(parameter, from, count, are_paired(rows_), at(room));
        return at(room);
    }

    Element<A>* own(const Array* array, i64 row) const {
        return reinterpret_cast<Element<A>*>(row_of(*array, row)) + from;
    }

    bool there(const Array* array) const {
        return rows_.dtype >= F32 && has_no_gaps(array->columns, sizeof(A));
    }

    const Rows& rows_;
    char* scratch_;

public:
    const i64 from, count;
};

template <typename A> INLINE A number_of(const Array* array, i64 row) {
    return as_number<A>(reinterpret_cast<const Element<A>*>(row_of(*array, row))->value);
}

template <typename A> INLINE void set_number(const Array* array, i64 row, double value) {
    reinterpret_cast<Element<A>*>(row_of(*array, row))->value = static_cast<A>(value);
}

INLINE void split(double centre, double correction, float& high, float& low) {
    high = static_cast<float>(centre + correction);
    low = static_cast<float>(centre + correction - high);
}

INLINE void split(double centre, double correction, double& high, double& low) {
    high = centre;
    low = correction;
}

// Calls visit(window) for each window of a row.
template <typename A, typename F> INLINE void for_windows(
    const Rows& rows, char* scratch, F visit
) {
    for (i64 from = 0; from < rows.width; from += rows.window)
        visit(Window<A>(rows, from, scratch));
}

// Asks for columns of the next row of large arrays while one is written: nothing else is read from memory
// then. An array may be absent.
template <int N, typename T> struct NextRow {
    template <typename... Arrays> NextRow(i64 row, i64 end, i64 from, const Arrays*... arrays)
        : columns_{columns_of(arrays, row + 1 < end ? row + 1 : row, from)...} {}

    template <typename V> INLINE void ask(i64 j) const {
        if constexpr (sizeof(V) > sizeof(double))
#pragma GCC unroll 3
            for (const char* columns : columns_)
                if (columns) __builtin_prefetch(columns + j * i64{sizeof(T)}, 0, 2);
    }

private:
    static const char* columns_of(const Array* array, i64 row, i64 from) {
        return array ? row_of(*array, row) + from * i64{sizeof(T)} : nullptr;
    }

    const char* columns_[N];
};

struct NoRow {
    template <typename V> INLINE void ask(i64) const {}
};

// Writes s = x + residual.
template <typename A, typename T> void add(const Forward& call, i64 row, char* scratch) {
    for_windows<A>(call, scratch, [&](const Window<A>& window) INLINED {
        const Element<T>* x = window.template read<T>(call.x, row, 0);
        const Element<T>* residual = window.template read<T>(call.residual, row, 1);
        window.template write<T>(call.s, row, [=](i64 j, auto kind) INLINED {
            return read<decltype(kind)>(x + j) + read<decltype(kind)>(residual + j);
        });
    });
}

// Means over a row of x - centre and of its square, by sums in S; without a centre, of the square alone.
template <typename S, typename A, bool CENTRED, typename T> INLINE Sums means_of(
    const Forward& call, const Array* array, i64 row, S centre, char* scratch
) {
    Sums sums = {0, 0};
    for_windows<A>(call, scratch, [&](const Window<A>& window) INLINED {
        const Element<T>* x = window.template again<T>(array, row, 0);
        const auto add = [=](i64 j, auto& first, auto& second) INLINED {
            auto value = read<Plain<decltype(first)>>(x + j);
            if (CENTRED) value = value - centre;
            if (CENTRED) first += value;
            second += value * value;
        };
        const Sums found = sums_over<S, ColumnsOf<S, T>>(window.count, add);
        sums.first += found.first;
        sums.second += found.second;
    });
    const double count = static_cast<double>(call.width);
    return {sums.first / count, sums.second / count};
}

constexpr int GUESSES = 4;  // elements whose mean is near that of all

// About the mean of a row; each of its elements, if these are equal.
template <typename T> INLINE float guess_of(const Element<T>* x, i64 width) {
    double mean = 0;
    for (i64 k = 0; k < GUESSES; ++k) mean += read<double>(x + width * k / GUESSES) / GUESSES;
    return static_cast<float>(mean);
}

// Normalises rows that are read as a dtype T.
template <typename A, bool CENTRED, typename T> void forward_of(
    const Forward& call, i64 begin, i64 end, char* scratch
) {
    const Array* array = call.residual ? call.s : call.x;
    StreamedRows<A, T> past_caches;
    for (i64 row = begin; row < end; ++row) {
        if (call.residual) add<A, T>(call, row, scratch);
        // Distances from the row's first element are 0 in a row of equal elements. What rounding
        // leaves of their squares is nothing for float32, unless a row is very long.
        const Element<T>* const x = Window<A>(call, 0, scratch).template read<T>(array, row, 0);
        double centre = CENTRED ? read<double>(x) : 0;
        const bool is_long = call.window < call.width;
        int passes = CENTRED && (sizeof(A) == sizeof(double) || is_long) ? 2 : 1;
        Sums means;
        if constexpr (sizeof(A) == sizeof(float))
            if (!is_long && (call.dtype < F32 || call.width > RUN<A>)) {
                const float guess = CENTRED ? guess_of(x, call.width) : 0;
                means = means_of<float, A, CENTRED, T>(call, array, row, guess, scratch);
                if (had_room(means.first, means.second - means.first * means.first)) {
                    centre = guess;
                    passes = 0;
                }
            }
        for (; passes > 0; --passes) {
            means = means_of<double, A, CENTRED, T>(call, array, row, centre, scratch);
            if (passes == 2) centre += means.first;
        }
        const double variance = means.second - means.first * means.first;
        const double factor = 1 / __builtin_sqrt((variance < 0 ? 0 : variance) + call.eps);
        if (CENTRED) set_number<A>(call.mean, row, centre + means.first);
        set_number<A>(call.inv_std, row, factor);
        // Rounded to one number, a mean is off by half a unit of its last place, which may be large
        // compared with x - mean.
        A high, low;
        split(centre, means.first, high, low);
        const A inv_std = static_cast<A>(factor);
        for_windows<A>(call, scratch, [&](const Window<A>& window) INLINED {
            const Element<T>* x = window.template again<T>(array, row, 0);
            const Element<A>*scale = window.scale(), *bias = window.bias();
            const auto values = [=](auto next) INLINED {
                return [=](i64 j, auto kind) INLINED {
                    typedef decltype(kind) V;
                    next.template ask<V>(j);
                    const V own = read<V>(x + j), distance = CENTRED ? own - high - low : own;
                    return distance * inv_std * read_beside<V>(scale, j) + read_beside<V>(bias, j);
                };
            };
            if (!call.large) return window.template write<T>(call.y, row, values(NoRow{}));
            const NextRow<2, T> next(row, end, window.from, call.x, call.residual);
            window.template write<T>(call.y, row, values(next), past_caches);
        });
    }
}

template <typename A, bool CENTRED> void forward_from(
    const Forward& call, i64 begin, i64 end, char* scratch
) {
    auto run = forward_of<A, CENTRED, A>;
    if constexpr (sizeof(A) == sizeof(float))
        if (call.halves)
            run = call.dtype == F16 ? forward_of<A, CENTRED, f16> : forward_of<A, CENTRED, bf16>;
    run(call, begin, end, scratch);
}

template <typename A> void forward(const Forward& call, i64 begin, i64 end, char* scratch) {
    const auto run = call.mean ? forward_from<A, true> : forward_from<A, false>;
    run(call, begin, end, scratch);
}

enum Kind { LAYER, RMS, OUTPUT };

constexpr bool is_centred(Kind kind) { return kind != RMS; }

// RMS norm has no mean: -0.0, which changes no number that it is added to, stands in.
template <typename A> constexpr A NOTHING = static_cast<A>(-0.0);

// A window's parameters, or null if they are not needed.
template <typename A> struct Parameters {
    const Element<A> *scale, *bias;
};

template <Kind KIND, typename A> Parameters<A> parameters_of(
    const Gradient& call, const Window<A>& window
) {
    const bool are_all = KIND == OUTPUT;
    return {are_all || call.dx ? window.scale() : nullptr, are_all ? window.bias() : nullptr};
}

// A row of a window of a gradient, whose columns it reads as numbers or vectors V, from a dtype T.
template <typename A, Kind KIND, typename T> struct GradientRow : Parameters<A> {
    GradientRow(
        const Gradient& call, const Window<A>& window, const Parameters<A>& parameters, i64 row
    )
        : Parameters<A>(parameters),
          dy(window.template read<T>(call.dy, row, 0)),
          source(window.template read<T>(call.source, row, 1)),
          mean(KIND == LAYER && call.mean ? number_of<A>(call.mean, row) : 0),
          inv_std(number_of<A>(call.inv_std, row)) {}

    template <typename V> INLINE V xhat(i64 j) const {
        const V value = read<V>(source + j);
        if (KIND == OUTPUT) return (value - read<V>(this->bias + j)) / read<V>(this->scale + j);
        return (KIND == LAYER ? value - mean : value) * inv_std;
    }

    const Element<T> *dy, *source;
    A mean, inv_std;
};

// Sums over columns of w and of w * xhat. Adds to sums over rows of dy * xhat and of dy, if given.
template <bool ADDS, typename A, Kind KIND, typename T> INLINE Sums sums_of(
    const GradientRow<A, KIND, T> row, i64 count, Element<A>* of_product = nullptr,
    Element<A>* of_dy = nullptr
) {
    return sums_over<A, ColumnsOf<A, T>>(count, [=](i64 j, auto& of_w, auto& of_w_xhat) INLINED {
        typedef Plain<decltype(of_w)> V;
        const V dy = read<V>(row.dy + j), scale = read<V>(row.scale + j);
        const V product = dy * row.template xhat<V>(j);
        if (is_centred(KIND)) of_w += dy * scale;
        of_w_xhat += product * scale;
        if (ADDS) write(read<V>(of_product + j) + product, of_product + j);
        if (ADDS && is_centred(KIND)) write(read<V>(of_dy + j) + dy, of_dy + j);
    });
}

// Asks for 16-bit columns of a later row: it takes a while to come.
template <typename T> INLINE void fetch_ahead(const Element<T>* from, i64 j) {
    if (sizeof(T) == 2) __builtin_prefetch(reinterpret_cast<const char*>(from + j) + AHEAD);
}

template <typename V> struct Columns {
    V products, gradients;
};

// Adds to those sums over rows alone.
template <int ROWS, typename A, Kind KIND, typename T> INLINE void add_to_columns(
    const GradientRow<A, KIND, T> (&rows)[ROWS], i64 count, Element<A>* of_product, Element<A>* of_dy
) {
    const auto add = [=](i64 j, auto kind) INLINED {
        typedef decltype(kind) V;
        Columns<V> to = {read<V>(of_product + j), read<V>(of_dy + j)};
#pragma GCC unroll 4
        for (int k = 0; k < ROWS; ++k) {
            fetch_ahead(rows[k].dy, j);
            fetch_ahead(rows[k].source, j);
            const V dy = read<V>(rows[k].dy + j);
            to.products += dy * rows[k].template xhat<V>(j);
            to.gradients += dy;
        }
        return to;
    };
    each_column<A, T>(count, add, [=](i64 j, auto sums) INLINED {
        write(sums.products, of_product + j);
        if (is_centred(KIND)) write(sums.gradients, of_dy + j);
    });
}

// Columns from which on several rows are added at a time; narrower rows are read in order.
constexpr i64 SEVERAL = 1 << 8;

template <Kind KIND, typename T, typename A> INLINE void add_rows_to_columns(
    const Gradient& call, const Window<A>& window, const Parameters<A>& parameters, i64 begin,
    i64 end, Element<A>* of_product, Element<A>* of_dy
) {
    typedef GradientRow<A, KIND, T> Row;
    i64 row = begin;
    // Several have no room at once if one is copied to it.
    const bool there =
        window.template lies_there<T>(call.dy) && window.template lies_there<T>(call.source);
    for (; there && window.count >= SEVERAL && row + 4 <= end; row += 4) {
        const Row rows[] = {
            {call, window, parameters, row}, {call, window, parameters, row + 1},
            {call, window, parameters, row + 2}, {call, window, parameters, row + 3},
        };
        add_to_columns(rows, window.count, of_product, of_dy);
    }
    for (; row < end; ++row) {
        const Row rows[] = {{call, window, parameters, row}};
        add_to_columns(rows, window.count, of_product, of_dy);
    }
}

template <typename A, Kind KIND, typename T> void means_of_gradient(
    const Gradient& call, i64 begin, i64 end, char* scratch
) {
    for (i64 row = begin; row < end; ++row) {
        double* means = call.means + 2 * row;
        means[0] = means[1] = 0;
        for_windows<A>(call, scratch, [&](const Window<A>& window) INLINED {
            const GradientRow<A, KIND, T> own(call, window, parameters_of<KIND>(call, window), row);
            const Sums sums = sums_of<false>(own, window.count);
            means[0] += sums.first;
            means[1] += sums.second;
        });
        for (int k = 0; k < 2; ++k) means[k] /= static_cast<double>(call.width);
    }
}

template <typename A, Kind KIND, typename T> void gradient_of(
    const Gradient& call, i64 begin, i64 end, i64 from, double* dy_xhat, double* dy, char* scratch
) {
    const Window<A> window(call, from, scratch);
    const i64 count = window.count;
    Element<A> *of_product = window.at(PRODUCTS), *of_dy = window.at(GRADIENTS);
    StreamedRows<A, T> past_caches;
    for (i64 j = 0; j < count; ++j) of_product[j].value = of_dy[j].value = 0;
    const Parameters<A> parameters = parameters_of<KIND>(call, window);
    if (!call.dx)
        add_rows_to_columns<KIND, T>(call, window, parameters, begin, end, of_product, of_dy);
    for (i64 row = begin; call.dx && row < end; ++row) {
        const GradientRow<A, KIND, T> own(call, window, parameters, row);
        const Sums sums = call.sums ? sums_of<true>(own, count, of_product, of_dy)
                                    : sums_of<false>(own, count);
        const double* means = call.means ? call.means + 2 * row : nullptr;
        const double width = static_cast<double>(call.width);
        A mean_w = static_cast<A>(means ? means[0] : sums.first / width);
        if (!call.centred) mean_w = NOTHING<A>;
        const A mean_product = static_cast<A>(means ? means[1] : sums.second / width);
        const Element<T>* ds = call.ds ? window.template read<T>(call.ds, row, 2) : nullptr;
        const auto values = [=](auto next) INLINED {
            return [=](i64 j, auto kind) INLINED {
                typedef decltype(kind) V;
                next.template ask<V>(j);
                const V product = own.template xhat<V>(j) * mean_product;
                const V rest = is_centred(KIND) ? product + mean_w : product;
                return (read<V>(own.dy + j) * read_beside<V>(own.scale, j) - rest) * own.inv_std;
            };
        };
        const auto sums_with = [=](auto value) INLINED {
            return [=](i64 j, auto kind) INLINED {
                return value(j, kind) + read<decltype(kind)>(ds + j);
            };
        };
        const auto write_row = [&](auto next, auto&... past_caches) INLINED {
            const auto value = values(next);
            if (!ds) window.template write<T>(call.dx, row, value, past_caches...);
            else window.template write<T>(call.dx, row, sums_with(value), past_caches...);
        };
        if (call.large)
            write_row(NextRow<3, T>(row, end, from, call.dy, call.source, call.ds), past_caches);
        else
            write_row(NoRow{});
    }
    if constexpr (IS_BF16<T>) {
        pair<false>(count, of_product);
        pair<false>(count, of_dy);
    }
    for (i64 j = 0; dy_xhat && j < count; ++j) dy_xhat[j] += of_product[j].value;
    for (i64 j = 0; dy && j < count; ++j) dy[j] += of_dy[j].value;
}

template <typename A, Kind KIND> void gradient_from(
    const Gradient& call, i64 begin, i64 end, i64 from, double* dy_xhat, double* dy, char* scratch
) {
    auto run = gradient_of<A, KIND, A>;
    // A division takes longer than a room.
    if constexpr (sizeof(A) == sizeof(float) && KIND != OUTPUT)
        if (call.halves)
            run = call.dtype == F16 ? gradient_of<A, KIND, f16> : gradient_of<A, KIND, bf16>;
    run(call, begin, end, from, dy_xhat, dy, scratch);
}

template <typename A> void gradient(
    const Gradient& call, i64 begin, i64 end, i64 from, double* dy_xhat, double* dy, char* scratch
) {
    const auto run = call.from_output ? gradient_from<A, OUTPUT>
        : call.centred                ? gradient_from<A, LAYER>
                                      : gradient_from<A, RMS>;
    run(call, begin, end, from, dy_xhat, dy, scratch);
}

template <typename A> void means(const Gradient& call, i64 begin, i64 end, char* scratch) {
    // A mean of 0 is that of an RMS norm.
    auto run = call.from_output ? means_of_gradient<A, OUTPUT, A> : means_of_gradient<A, LAYER, A>;
    if constexpr (sizeof(A) == sizeof(float))
        if (call.halves)
            run = call.dtype == F16 ? means_of_gradient<A, LAYER, f16>
                                    : means_of_gradient<A, LAYER, bf16>;
    run(call, begin, end, scratch);
}

template <typename A> void inverse(const Inverse& call, i64 begin, i64 end, char* scratch) {
    StreamedRows<A, A> past_caches;
    for (i64 row = begin; row < end; ++row) {
        const A mean = number_of<A>(call.mean, row), inv_std = number_of<A>(call.inv_std, row);
        for_windows<A>(call, scratch, [&](const Window<A>& window) INLINED {
            const Element<A>*y = window.input(call.y, row, 0), *scale = window.scale();
            const Element<A>* bias = window.bias();
            const auto value = [=](i64 j, auto kind) INLINED {
                typedef decltype(kind) V;
                return (read<V>(y + j) - read<V>(bias + j)) / read<V>(scale + j) / inv_std + mean;
            };
            window.template write<A>(call.x, row, value, past_caches);
        });
    }
}

template <typename A, bool SILU, bool SLOPES> void activate_all(
    const Element<A>* gate, i64 count, Element<A>* value, Element<A>* slope
) {
    INDEPENDENT
    for (i64 j = 0; j < count; ++j) {
        const Activated<A> own = activated<A, SILU>(gate[j].value);
        value[j].value = own.value;
        if (SLOPES) slope[j].value = own.slope;
    }
}

// A row of a window of a gated norm, whose columns it reads as numbers or vectors V. Only a gradient reads
// slopes.
template <typename A, bool BEFORE, bool SLOPES> struct GatedRow {
    // `again`: nobody has used the rooms since the same row was made.
    GatedRow(
        const Gated& call, const Window<A>& window, const Array* from, const Array* gate, i64 row,
        bool again = false
    )
        : x(again ? window.template again<A>(from, row, 1) : window.input(from, row, 1)),
          scale(window.scale()), value(window.at(4)), slope(window.at(6)) {
        if (again && window.count == call.width) return;
        const auto run = call.silu ? activate_all<A, true, SLOPES> : activate_all<A, false, SLOPES>;
        run(window.input(gate, row, 2), window.count, value, slope);
    }

    // The data to be normalised.
    template <typename V> INLINE V source(i64 j) const {
        return BEFORE ? read<V>(x + j) : read<V>(x + j) * read<V>(value + j);
    }

    const Element<A> *x, *scale;
    Element<A> *value, *slope;
};

template <typename A, bool BEFORE> void gated_forward_of(
    const GatedForward& call, i64 begin, i64 end, char* scratch
) {
    for (i64 row = begin; row < end; ++row) {
        double square = 0;
        for_windows<A>(call, scratch, [&](const Window<A>& window) INLINED {
            const GatedRow<A, BEFORE, false> own(call, window, call.x, call.gate, row);
            const auto add = [=](i64 j, auto&, auto& total) INLINED {
                const auto source = own.template source<Plain<decltype(total)>>(j);
                total += source * source;
            };
            square += sums_over<double>(window.count, add).second;
        });
        const double factor = 1 / __builtin_sqrt(square / static_cast<double>(call.width) + call.eps);
        set_number<A>(call.inv_std, row, factor);
        const A inv_std = static_cast<A>(factor);
        for_windows<A>(call, scratch, [&](const Window<A>& window) INLINED {
            const GatedRow<A, BEFORE, false> own(call, window, call.x, call.gate, row, true);
            window.write(call.y, row, [=](i64 j, auto kind) INLINED {
                typedef decltype(kind) V;
                const V y = own.template source<V>(j) * inv_std * read<V>(own.scale + j);
                return BEFORE ? y * read<V>(own.value + j) : y;
            });
        });
    }
}

template <typename A> void gated_forward(
    const GatedForward& call, i64 begin, i64 end, char* scratch
) {
    const auto run = call.before ? gated_forward_of<A, true> : gated_forward_of<A, false>;
    run(call, begin, end, scratch);
}

// The same of a gradient.
template <typename A, bool BEFORE> struct GatedGradientRow : GatedRow<A, BEFORE, true> {
    GatedGradientRow(const GatedGradient& call, const Window<A>& window, i64 row)
        : GatedRow<A, BEFORE, true>(call, window, call.x, call.gate, row),
          dy(window.input(call.dy, row, 0)),
          inv_std(number_of<A>(call.inv_std, row)) {}

    template <typename V> INLINE V xhat(i64 j) const { return this->template source<V>(j) * inv_std; }

    template <typename V> INLINE V u(i64 j) const {
        return BEFORE ? read<V>(dy + j) * read<V>(this->value + j) : read<V>(dy + j);
    }

    // dx and dgate, in the place of the activated gate and its derivative.
    INLINE void differentiate(i64 count, A mean) const {
        INDEPENDENT
        for (i64 j = 0; j < count; ++j) {
            const A a = this->value[j].value, slope = this->slope[j].value;
            const A scale = this->scale[j].value, hat = xhat<A>(j);
            const A d = (u<A>(j) * scale - hat * mean) * inv_std;
            this->value[j].value = BEFORE ? d : d * a;
            this->slope[j].value = (BEFORE ? dy[j].value * hat * scale : d * this->x[j].value) * slope;
        }
    }

    const Element<A>* dy;
    A inv_std;
};

// The sum over columns of u * scale * xhat. Adds to sums over rows of u * xhat.
template <typename A, bool BEFORE, bool ADDS> INLINE double products_of(
    const GatedGradientRow<A, BEFORE> row, i64 count, Element<A>* of_product
) {
    const auto add = [=](i64 j, auto&, auto& total) INLINED {
        typedef Plain<decltype(total)> V;
        const V product = row.template u<V>(j) * row.template xhat<V>(j);
        total += product * read<V>(row.scale + j);
        if (ADDS) write(read<V>(of_product + j) + product, of_product + j);
    };
    return sums_over<A>(count, add).second;
}

template <typename A, bool BEFORE> void gated_means_of(
    const GatedGradient& call, i64 begin, i64 end, char* scratch
) {
    for (i64 row = begin; row < end; ++row) {
        double total = 0;
        for_windows<A>(call, scratch, [&](const Window<A>& window) INLINED {
            const GatedGradientRow<A, BEFORE> own(call, window, row);
            total += products_of<A, BEFORE, false>(own, window.count, nullptr);
        });
        call.means[row] = total / static_cast<double>(call.width);
    }
}

template <typename A, bool BEFORE> void gated_gradient_of(
    const GatedGradient& call, i64 begin, i64 end, i64 from, double* u_xhat, char* scratch
) {
    const Window<A> window(call, from, scratch);
    const i64 count = window.count;
    Element<A>* of_product = window.at(PRODUCTS);
    for (i64 j = 0; j < count; ++j) of_product[j].value = 0;
    for (i64 row = begin; row < end; ++row) {
        const GatedGradientRow<A, BEFORE> own(call, window, row);
        const double total = call.sums ? products_of<A, BEFORE, true>(own, count, of_product)
                                       : products_of<A, BEFORE, false>(own, count, nullptr);
        if (!call.dx && !call.dgate) continue;
        const double width = static_cast<double>(call.width);
        own.differentiate(count, static_cast<A>(call.means ? call.means[row] : total / width));
        if (call.dx) window.store(call.dx, row, own.value);
        if (call.dgate) window.store(call.dgate, row, own.slope);
    }
    for (i64 j = 0; u_xhat && j < count; ++j) u_xhat[j] += of_product[j].value;
}

template <typename A> void gated_gradient(
    const GatedGradient& call, i64 begin, i64 end, i64 from, double* u_xhat, double*, char* scratch
) {
    const auto run = call.before ? gated_gradient_of<A, true> : gated_gradient_of<A, false>;
    run(call, begin, end, from, u_xhat, scratch);
}

template <typename A> void gated_means(
    const GatedGradient& call, i64 begin, i64 end, char* scratch
) {
    const auto run = call.before ? gated_means_of<A, true> : gated_means_of<A, false>;
    run(call, begin, end, scratch);
}

template <typename A> constexpr RowKernels KERNELS = {
    widen_parameter<A>, narrow_columns<A>, forward<A>, means<A>, gradient<A>, inverse<A>,
    gated_forward<A>, gated_means<A>, gated_gradient<A>,
};
const RowKernels row_kernels[2] = {KERNELS<float>, KERNELS<double>};

}  // namespace ISA
