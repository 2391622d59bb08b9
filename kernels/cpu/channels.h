// Norms over channels on a CPU: what is compiled for each instruction set.

#pragma once

#include "arrays.h"

// Elements of a channel that are visited at a time; rows of channels, and channels of a row.
constexpr i64 BLOCK = 1 << 13, ROWS = 16, COLUMNS = 1 << 10;

// Runs of elements without gaps that lie `stride` bytes apart.
struct Lines {
    char* data;
    i64 stride;
};

// Loops over elements in A, the dtype of the computation. An output may be an input.
template <typename A> struct ChannelKernels {
    // `count` of the elements that the axes lead to, from number `from` on.
    void (*load)(Dtype dtype, char* data, const Axes& axes, i64 from, i64 count, A* to);
    void (*store)(Dtype dtype, const A* values, i64 count, char* data, const Axes& axes, i64 from);

    // Elements of one channel, in `rows` lines of `count`. The two sums are written.
    //
    //   deviations     of d and of d^2, with d = x * factor - centre
    //   products       of dy * xhat and of dy, with xhat = (x - mean) * inv_std
    //   normalise      y = (x - high - low) * factor + bias
    //   differentiate  dx = (dy * scale - (xhat * of_product + of_w)) * outer
    //   multiply       dx = dy * outer
    //   total          of values and of values * weights
    void (*deviations)(Lines x, i64 rows, i64 count, double factor, double centre, double* sums);
    void (*products)(Lines dy, Lines x, i64 rows, i64 count, A mean, A inv_std, double* sums);
    void (*normalise)(
        Lines x, i64 rows, i64 count, A high, A low, A factor, A bias, Lines y
    );
    void (*differentiate)(
        Lines dy, Lines x, i64 rows, i64 count, A mean, A inv_std, A scale, A of_product, A of_w,
        A outer, Lines dx
    );
    void (*multiply)(Lines dy, i64 rows, i64 count, A outer, Lines dx);
    void (*total)(const double* values, const A* weights, i64 count, double* sums);

    // The same of at most ROWS lines of at most COLUMNS channels, which have numbers of their own. The
    // sums are added to what is there.
    void (*deviations_of_rows)(
        Lines x, i64 rows, i64 count, double factor, const double* centre, double* first,
        double* second
    );
    void (*products_of_rows)(
        Lines dy, Lines x, i64 rows, i64 count, const A* mean, const A* inv_std, double* first,
        double* second
    );
    void (*normalise_rows)(
        Lines x, i64 rows, i64 count, const A* high, const A* low, const A* factor, const A* bias,
        Lines y
    );
    void (*differentiate_rows)(
        Lines dy, Lines x, i64 rows, i64 count, const A* mean, const A* inv_std, const A* scale,
        const A* of_product, const A* of_w, const A* outer, Lines dx
    );
    void (*multiply_rows)(Lines dy, i64 rows, i64 count, const A* outer, Lines dx);
};

namespace baseline {
extern const ChannelKernels<float> channel_kernels_f32;
extern const ChannelKernels<double> channel_kernels_f64;
}
namespace x86_64_v3 {
extern const ChannelKernels<float> channel_kernels_f32;
extern const ChannelKernels<double> channel_kernels_f64;
}
namespace x86_64_v4 {
extern const ChannelKernels<float> channel_kernels_f32;
extern const ChannelKernels<double> channel_kernels_f64;
}
