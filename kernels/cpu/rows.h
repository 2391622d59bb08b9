// Norms over rows on a CPU: what is compiled for each instruction set, and what calls it.

#pragma once

#include "arrays.h"

// Absent arrays are null. `scale` and `bias` are numbers of the accumulation dtype without gaps, an
// absent scale ones, an absent bias zeros that change no number to which they are added.
struct Forward {
    Dtype dtype;  // of the data
    i64 width;
    double eps;
    const Array *x, *residual, *y, *s, *mean, *inv_std;  // RMS norm: without mean
    const void *scale, *bias;
};

struct Gradient {
    Dtype dtype;
    i64 width;
    bool from_output, centred;
    const Array *dy, *source, *ds, *mean, *inv_std, *dx;
    const void *scale, *bias;
};

struct Inverse {
    Dtype dtype;
    i64 width;
    const Array *y, *mean, *inv_std, *x;
    const void *scale, *bias;
};

// Of data that is computed with in float32, or in float64. Each works on rows [begin, end), with
// scratch of `ROOMS` rows of float64.
struct RowKernels {
    void (*forward)(const Forward&, i64 begin, i64 end, char* scratch);
    // Adds to sums over rows, of which there are `width` each; null if they are not wanted.
    void (*gradient)(
        const Gradient&, i64 begin, i64 end, double* dy_xhat, double* dy, char* scratch
    );
    void (*inverse)(const Inverse&, i64 begin, i64 end, char* scratch);
};

constexpr int ROOMS = 6;

namespace baseline {
extern const RowKernels row_kernels[2];
}
namespace x86_64_v3 {
extern const RowKernels row_kernels[2];
}
namespace x86_64_v4 {
extern const RowKernels row_kernels[2];
}
