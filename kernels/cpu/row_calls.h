// Calls of norms over rows, whose rows and columns are shared among threads.

#pragma once

#include "pool.h"
#include "rows.h"

// Arguments of all calls.
struct Setting {
    const RowKernels* kernels;  // of the instruction set
    i64 rows, samples;  // each has as many rows, and scale and bias of its own
    int threads;
    Patience* patience;
};

// Each returns false if it was given up. They throw nothing but std::bad_alloc, before they write.
bool run_forward(const Setting& setting, Forward call);
// `dscale` and `dbias`, of the scale's dtype, may be absent.
bool run_gradient(
    const Setting& setting, Gradient call, const Array* dscale, const Array* dbias
);
bool run_inverse(const Setting& setting, Inverse call);
bool run_gated_forward(const Setting& setting, GatedForward call);
bool run_gated_gradient(const Setting& setting, GatedGradient call, const Array* dscale);
