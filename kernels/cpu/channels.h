// Norms over channels on a CPU: the interface that each instruction set implements.

#pragma once

#include "arrays.h"

// Elements that are visited at a time; rows of channels, channels of a row, and channels whose lines
// are visited in turn.
constexpr i64 BLOCK = 1 << 13, ROWS = 16, COLUMNS = 1 << 10, CHANNELS = 16;

// Elements without gaps: `stride` bytes from one line to the next, `channel` to that of the next one.
// Passed by reference: a copy of what was just written is waited for.
struct Lines {
    char* data;
    i64 stride, channel;
};

// Bytes from an element of x, and of dy, to what is fetched while these are read; 0 is no use, and cheap.
struct Ahead {
    i64 x, dy;
};

// Loops over elements of one dtype, in A, that of the computation. Numbers are one of each channel;
// an output may be an input, unless it is streamed: past the caches, from and to channels that lie
// side by side. Sums of deviations are in float64, those of 16-bit numbers only if they are to be wide.
//
//   deviations     sums of d and of d^2, with d = x * factor - centre
//   products       sums of dy * xhat and of dy, with xhat = (x - mean) * inv_std
//   normalise      y = (x - mean) * factor + offset
//   differentiate  dx = (dy * scale - (xhat * of_product + of_w)) * outer
//   multiply       dx = dy * outer
template <typename A> struct ChannelKernels {
    i64 streamed;  // bytes of a result from which on it is written past the caches

    // Lines of `count` elements of each channel; sums are written.
    void (*deviations)(
        const Lines& x, i64 lines, i64 channels, i64 count, double factor, const double* centre,
        bool wide, double* first, double* second, i64 ahead
    );
    void (*products)(
        const Lines& dy, const Lines& x, i64 lines, i64 channels, i64 count, const A* mean,
        const A* inv_std, double* first, double* second, Ahead ahead
    );
    void (*normalise)(
        const Lines& x, i64 lines, i64 channels, i64 count, const A* mean, const A* factor,
        const A* offset, const Lines& y, bool streamed, i64 ahead
    );
    void (*differentiate)(
        const Lines& dy, const Lines& x, i64 lines, i64 channels, i64 count, const A* mean,
        const A* inv_std, const A* scale, const A* of_product, const A* of_w, const A* outer,
        const Lines& dx, bool streamed, Ahead ahead
    );
    void (*multiply)(
        const Lines& dy, i64 lines, i64 channels, i64 count, const A* outer, const Lines& dx,
        bool streamed
    );

    // At most ROWS lines of at most COLUMNS channels, an element of each; sums are added to what is
    // there.
    void (*deviations_of_rows)(
        const Lines& x, i64 rows, i64 channels, double factor, const double* centre, bool wide,
        double* first, double* second, i64 ahead
    );
    void (*products_of_rows)(
        const Lines& dy, const Lines& x, i64 rows, i64 channels, const A* mean, const A* inv_std,
        double* first, double* second
    );
    void (*normalise_rows)(
        const Lines& x, i64 rows, i64 channels, const A* mean, const A* factor, const A* offset,
        const Lines& y
    );
    void (*differentiate_rows)(
        const Lines& dy, const Lines& x, i64 rows, i64 channels, const A* mean, const A* inv_std,
        const A* scale, const A* of_product, const A* of_w, const A* outer, const Lines& dx
    );
    void (*multiply_rows)(const Lines& dy, i64 rows, i64 channels, const A* outer, const Lines& dx);
};

namespace baseline {
extern const ChannelKernels<float> channel_kernels_f32[3];
extern const ChannelKernels<double> channel_kernels_f64;
}
namespace x86_64_v3 {
extern const ChannelKernels<float> channel_kernels_f32[3];
extern const ChannelKernels<double> channel_kernels_f64;
}
namespace x86_64_v4 {
extern const ChannelKernels<float> channel_kernels_f32[3];
extern const ChannelKernels<double> channel_kernels_f64;
}
