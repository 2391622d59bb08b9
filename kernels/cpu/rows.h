// Norms over rows on a CPU: the interface that each instruction set implements, and its arguments.

#pragma once

#include "arrays.h"

// Rows up to WHOLE columns are visited once; longer ones WINDOW columns at a time, again and again.
constexpr i64 WHOLE = 1 << 15, WINDOW = 1 << 12;

// A number for each column. `value` is added to what the array has, or stands for an absent one.
struct Parameter {
    Dtype dtype;
    const Array* array;
    double value;
    i64 sample = 0;  // the row of the array
};

// Arguments of all calls. Absent arrays are null.
struct Rows {
    Dtype dtype;  // of the data
    i64 width;
    i64 window;  // columns that are visited at a time
    Parameter scale, bias;
    // All of scale and bias in the dtype of the computation, if a window has all columns.
    const void *whole_scale, *whole_bias;
    bool reads_bias;
    bool halves = false;  // 16-bit columns are read and written where they lie
    bool large;     // more than the caches next to a processor have room for
    bool streamed;  // y, dx or an inverse's x may be written past the caches
};

// True if parameters are as twins of bfloat16 columns hold them.
inline bool are_paired(const Rows& rows) { return rows.halves && rows.dtype == BF16; }

struct Forward : Rows {
    double eps;
    const Array *x, *residual, *y, *s, *mean, *inv_std;  // RMS norm: without mean
};

struct Gradient : Rows {
    bool from_output, centred, sums;  // whether sums over rows are wanted
    const Array *dy, *source, *ds, *mean, *inv_std, *dx;  // dx may be absent
    double* means;  // of w and of w * xhat, for each row, if rows are cut into windows
};

struct Inverse : Rows {
    const Array *y, *mean, *inv_std, *x;
};

// RMS norm with an activated gate, which is multiplied with the norm's result or with its input.
struct Gated : Rows {
    bool silu, before;  // the activation is SiLU, or else sigmoid; the norm comes before the gate
};

struct GatedForward : Gated {
    double eps;
    const Array *x, *gate, *y, *inv_std;
};

struct GatedGradient : Gated {
    bool sums;  // as a gradient's
    const Array *dy, *x, *gate, *inv_std, *dx, *dgate;  // either of the last may be absent
    double* means;  // as a gradient's
};

// Kernels of rows that are computed in float32, or in float64. Each works on rows [begin, end), with
// scratch of ROOMS windows of float64.
struct RowKernels {
    void (*widen)(const Parameter&, i64 from, i64 count, bool pairs, void* to);
    // Numbers of the dtype of the computation, as columns of a row that is at `data`.
    void (*narrow)(
        Dtype, const void* from, const Axes& columns, char* data, i64 first, i64 count
    );
    void (*forward)(const Forward&, i64 begin, i64 end, char* scratch);
    // Writes `means`.
    void (*means)(const Gradient&, i64 begin, i64 end, char* scratch);
    // Writes the columns of a window that begins at `from`, and adds to the sums over rows of each if
    // they are not null. Those of these rows stay in rooms of scratch.
    void (*gradient)(
        const Gradient&, i64 begin, i64 end, i64 from, double* dy_xhat, double* dy, char* scratch
    );
    void (*inverse)(const Inverse&, i64 begin, i64 end, char* scratch);
    void (*gated_forward)(const GatedForward&, i64 begin, i64 end, char* scratch);
    // As `means` and `gradient`; there is no sum of dy.
    void (*gated_means)(const GatedGradient&, i64 begin, i64 end, char* scratch);
    void (*gated_gradient)(
        const GatedGradient&, i64 begin, i64 end, i64 from, double* u_xhat, double*, char* scratch
    );
};

// Rooms of scratch, and those of sums over rows: of products with xhat, and of dy.
constexpr int ROOMS = 7, PRODUCTS = 3, GRADIENTS = 4;

namespace baseline {
extern const RowKernels row_kernels[2];
}
namespace x86_64_v3 {
extern const RowKernels row_kernels[2];
}
namespace x86_64_v4 {
extern const RowKernels row_kernels[2];
}
