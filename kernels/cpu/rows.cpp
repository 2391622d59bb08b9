// Norms over rows on a CPU, for one instruction set: ISA names it, and the namespace.
//
// With xhat = (x - mean) * inv_std (RMS norm: x * inv_std; from the output: (y - bias) / scale) and
// w = dy * scale, means over a row:
//
//   forward    y  = xhat * scale + bias
//   gradient   dx = inv_std * (w - mean(w) - xhat * mean(w * xhat)) + ds
//   inverse    x  = (y - bias) / scale / inv_std + mean
//
// Plain loops that a compiler makes vectors of. Bits are the same for each instruction set: sums
// have LANES totals each, whatever a vector holds, and nothing is fused. A row's results depend on
// that row alone.

#include "rows.h"

#include "floats.h"

// Loops whose arrays may be one array, element by element, and do not overlap otherwise.
#define INDEPENDENT _Pragma("GCC ivdep")

namespace ISA {

constexpr int LANES = 32;
constexpr i64 RUN = 8 * LANES;    // elements that one set of totals holds before float64 takes over
constexpr i64 CHUNK = 4 * RUN;    // and in float64, before the lanes are added up
constexpr int MOST_CHUNKS = 64;   // so rows have at most 65,536 columns

struct Sums {
    double first, second;
};

INLINE double sum_of(double (&lanes)[LANES]) {
#pragma GCC unroll 5
    for (int half = LANES / 2; half > 0; half /= 2)
#pragma GCC unroll 16
        for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
    return lanes[0];
}

// Equal terms double without an error; one running total of them drifts by a unit for every four.
INLINE double by_halves(double* values, int count) {
    while (count > 1) {
        const int half = count / 2;
        for (int k = 0; k < half; ++k) values[k] += values[count - half + k];
        count -= half;
    }
    return values[0];
}

// Two sums over a row: add(column, first, second) adds a column's terms to two totals.
template <typename A, typename F> INLINE Sums sums_over(i64 width, F add) {
    double first[MOST_CHUNKS], second[MOST_CHUNKS];
    int chunks = 0;
    for (i64 at = 0; at < width; ++chunks) {
        const i64 end = at + CHUNK < width ? at + CHUNK : width;
        double lanes[2][LANES] = {};
        while (at < end) {
            const i64 stop = at + RUN < end ? at + RUN : end;
            A run[2][LANES] = {};
            for (; at + LANES <= stop; at += LANES) {
                INDEPENDENT
                for (int l = 0; l < LANES; ++l) add(at + l, run[0][l], run[1][l]);
            }
            INDEPENDENT
            for (int l = 0; l < static_cast<int>(stop - at); ++l)
                add(at + l, run[0][l], run[1][l]);
            at = stop;
            for (int l = 0; l < LANES; ++l) lanes[0][l] += static_cast<double>(run[0][l]);
            for (int l = 0; l < LANES; ++l) lanes[1][l] += static_cast<double>(run[1][l]);
        }
        first[chunks] = sum_of(lanes[0]);
        second[chunks] = sum_of(lanes[1]);
    }
    return {by_halves(first, chunks), by_halves(second, chunks)};
}

// A copy of a row of dtype T in the dtype of the computation.
template <typename T, typename A> void widen_row(
    char* data, const Axes& axes, i64 width, Element<A>* to
) {
    if (has_no_gaps(axes, sizeof(T))) {
        const Element<T>* from = reinterpret_cast<Element<T>*>(data);
        INDEPENDENT
        for (i64 j = 0; j < width; ++j) to[j].value = widen(from[j].value);
    } else {
        for_each(data, axes, [=](char* from, i64 j) {
            to[j].value = widen(reinterpret_cast<Element<T>*>(from)->value);
        });
    }
}

// A row of dtype T, of numbers in the dtype of the computation.
template <typename T, typename A> void narrow_row(
    const Element<A>* from, i64 width, char* data, const Axes& axes
) {
    if (has_no_gaps(axes, sizeof(T))) {
        Element<T>* to = reinterpret_cast<Element<T>*>(data);
        INDEPENDENT
        for (i64 j = 0; j < width; ++j) narrow(from[j].value, to[j].value);
    } else {
        for_each(data, axes, [=](char* to, i64 j) {
            narrow(from[j].value, reinterpret_cast<Element<T>*>(to)->value);
        });
    }
}

// What reads and writes rows of a dtype: where they lie, or through a room of a thread's scratch.
template <typename A> class Rows {
public:
    Rows(Dtype dtype, i64 width, char* scratch)
        : dtype_(dtype), width_(width), scratch_(scratch) {}

    const Element<A>* input(const Array* array, i64 row, int room) const {
        char* data = row_of(*array, row);
        if (there(array)) return reinterpret_cast<Element<A>*>(data);
        Element<A>* copy = at(room);
        const auto run = sizeof(A) == 8 ? widen_row<A, A>
            : dtype_ == F16             ? widen_row<f16, A>
            : dtype_ == BF16            ? widen_row<bf16, A>
                                        : widen_row<A, A>;
        run(data, array->columns, width_, copy);
        return copy;
    }

    // Where a row of a result is computed; `store` then writes it where it belongs.
    Element<A>* output(const Array* array, i64 row, int room) const {
        return there(array) ? reinterpret_cast<Element<A>*>(row_of(*array, row)) : at(room);
    }

    void store(const Array* array, i64 row, const Element<A>* values) const {
        if (there(array)) return;
        const auto run = sizeof(A) == 8 ? narrow_row<A, A>
            : dtype_ == F16             ? narrow_row<f16, A>
            : dtype_ == BF16            ? narrow_row<bf16, A>
                                        : narrow_row<A, A>;
        run(values, width_, row_of(*array, row), array->columns);
    }

    Element<A>* at(int room) const {
        return reinterpret_cast<Element<A>*>(scratch_ + room * width_ * i64{sizeof(double)});
    }

private:
    bool there(const Array* array) const {
        return dtype_ >= F32 && has_no_gaps(array->columns, sizeof(A));
    }

    Dtype dtype_;
    i64 width_;
    char* scratch_;
};

template <typename A> INLINE A number_of(const Array* array, i64 row) {
    return reinterpret_cast<const Element<A>*>(row_of(*array, row))->value;
}

template <typename A> INLINE void set_number(const Array* array, i64 row, double value) {
    reinterpret_cast<Element<A>*>(row_of(*array, row))->value = static_cast<A>(value);
}

// A mean in two pieces: rounded to one number it is off by half a unit of its last place, which may
// be large compared with x - mean.
template <typename A> struct Moments {
    A high, low;
    double mean, variance;
};

INLINE void split(double centre, double correction, float& high, float& low) {
    high = static_cast<float>(centre + correction);
    low = static_cast<float>(centre + correction - high);
}

INLINE void split(double centre, double correction, double& high, double& low) {
    high = centre;
    low = correction;
}

// Sums of distances from the row's first element, which are 0 in a row of equal elements; then of
// distances from the mean, which correct what rounding left.
template <typename A> INLINE Moments<A> moments_of(const Element<A>* x, i64 width) {
    Moments<A> found;
    const double first = x[0].value, count = static_cast<double>(width);
    const Sums distances = sums_over<double>(width, [=](i64 j, double& sum, double&) {
        sum += static_cast<double>(x[j].value) - first;
    });
    const double centre = first + distances.first / count;
    const Sums sums = sums_over<double>(width, [=](i64 j, double& sum, double& squares) {
        const double deviation = static_cast<double>(x[j].value) - centre;
        sum += deviation;
        squares += deviation * deviation;
    });
    const double correction = sums.first / count;
    const double variance = sums.second / count - correction * correction;
    split(centre, correction, found.high, found.low);
    found.mean = centre + correction;
    found.variance = variance < 0 ? 0 : variance;
    return found;
}

template <typename A> INLINE double mean_square_of(const Element<A>* x, i64 width) {
    const Sums sums = sums_over<double>(width, [=](i64 j, double& sum, double&) {
        const double value = x[j].value;
        sum += value * value;
    });
    return sums.first / static_cast<double>(width);
}

// Writes s = x + residual; returns it as it was rounded.
template <typename A> const Element<A>* add(
    const Forward& call, const Rows<A>& rows, i64 row, const Element<A>* x
) {
    const Element<A>* residual = rows.input(call.residual, row, 1);
    Element<A>* s = rows.output(call.s, row, 2);
    INDEPENDENT
    for (i64 j = 0; j < call.width; ++j) s[j].value = x[j].value + residual[j].value;
    rows.store(call.s, row, s);
    return rows.input(call.s, row, 0);
}

template <typename A> void forward(const Forward& call, i64 begin, i64 end, char* scratch) {
    const i64 width = call.width;
    const A* scale = static_cast<const A*>(call.scale);
    const A* bias = static_cast<const A*>(call.bias);
    const Rows<A> rows(call.dtype, width, scratch);
    for (i64 row = begin; row < end; ++row) {
        const Element<A>* x = rows.input(call.x, row, 0);
        if (call.residual) x = add(call, rows, row, x);
        Element<A>* y = rows.output(call.y, row, 3);
        if (call.mean) {
            const Moments<A> moments = moments_of(x, width);
            const double factor = 1 / __builtin_sqrt(moments.variance + call.eps);
            set_number<A>(call.mean, row, moments.mean);
            set_number<A>(call.inv_std, row, factor);
            const A high = moments.high, low = moments.low, inv_std = static_cast<A>(factor);
            INDEPENDENT
            for (i64 j = 0; j < width; ++j)
                y[j].value = (x[j].value - high - low) * inv_std * scale[j] + bias[j];
        } else {
            const double factor = 1 / __builtin_sqrt(mean_square_of(x, width) + call.eps);
            set_number<A>(call.inv_std, row, factor);
            const A inv_std = static_cast<A>(factor);
            INDEPENDENT
            for (i64 j = 0; j < width; ++j) y[j].value = x[j].value * inv_std * scale[j] + bias[j];
        }
        rows.store(call.y, row, y);
    }
}

enum Kind { LAYER, RMS, OUTPUT };

template <typename A, Kind KIND> void gradient_of(
    const Gradient& call, i64 begin, i64 end, double* dy_xhat, double* sum_dy, char* scratch
) {
    const i64 width = call.width;
    const double count = static_cast<double>(width);
    const A* scale = static_cast<const A*>(call.scale);
    const A* bias = static_cast<const A*>(call.bias);
    const Rows<A> rows(call.dtype, width, scratch);
    Element<A> *products = rows.at(4), *plain = rows.at(5);
    for (i64 j = 0; j < width; ++j) products[j].value = plain[j].value = 0;
    for (i64 row = begin; row < end; ++row) {
        const Element<A>* dy = rows.input(call.dy, row, 0);
        const Element<A>* source = rows.input(call.source, row, 1);
        const A mean = KIND == LAYER ? number_of<A>(call.mean, row) : 0;
        const A inv_std = number_of<A>(call.inv_std, row);
        const auto xhat = [=](i64 j) __attribute__((always_inline)) {
            const A value = source[j].value;
            if (KIND == OUTPUT) return (value - bias[j]) / scale[j];
            return (KIND == LAYER ? value - mean : value) * inv_std;
        };
        const Sums sums = sums_over<A>(width, [=](i64 j, A& of_w, A& of_product) {
            const A g = dy[j].value, product = g * xhat(j);
            if (KIND != RMS) of_w += g * scale[j];
            of_product += product * scale[j];
            products[j].value += product;
            if (KIND != RMS) plain[j].value += g;
        });
        const A mean_w = static_cast<A>(sums.first / count);
        const A mean_product = static_cast<A>(sums.second / count);
        const auto value = [=](i64 j) __attribute__((always_inline)) {
            const A product = xhat(j) * mean_product;
            const A rest = KIND == RMS ? product : product + mean_w;
            return (dy[j].value * scale[j] - rest) * inv_std;
        };
        Element<A>* dx = rows.output(call.dx, row, 3);
        if (call.ds) {
            const Element<A>* ds = rows.input(call.ds, row, 2);
            INDEPENDENT
            for (i64 j = 0; j < width; ++j) dx[j].value = value(j) + ds[j].value;
        } else {
            INDEPENDENT
            for (i64 j = 0; j < width; ++j) dx[j].value = value(j);
        }
        rows.store(call.dx, row, dx);
    }
    for (i64 j = 0; dy_xhat && j < width; ++j) dy_xhat[j] += products[j].value;
    for (i64 j = 0; sum_dy && j < width; ++j) sum_dy[j] += plain[j].value;
}

template <typename A> void gradient(
    const Gradient& call, i64 begin, i64 end, double* dy_xhat, double* dy, char* scratch
) {
    const auto run = call.from_output ? gradient_of<A, OUTPUT>
        : call.centred                ? gradient_of<A, LAYER>
                                      : gradient_of<A, RMS>;
    run(call, begin, end, dy_xhat, dy, scratch);
}

template <typename A> void inverse(const Inverse& call, i64 begin, i64 end, char* scratch) {
    const A* scale = static_cast<const A*>(call.scale);
    const A* bias = static_cast<const A*>(call.bias);
    const Rows<A> rows(call.dtype, call.width, scratch);
    for (i64 row = begin; row < end; ++row) {
        const Element<A>* y = rows.input(call.y, row, 0);
        const A mean = number_of<A>(call.mean, row), inv_std = number_of<A>(call.inv_std, row);
        Element<A>* x = rows.output(call.x, row, 1);
        INDEPENDENT
        for (i64 j = 0; j < call.width; ++j)
            x[j].value = (y[j].value - bias[j]) / scale[j] / inv_std + mean;
        rows.store(call.x, row, x);
    }
}

const RowKernels row_kernels[2] = {
    {forward<float>, gradient<float>, inverse<float>},
    {forward<double>, gradient<double>, inverse<double>},
};

}  // namespace ISA
