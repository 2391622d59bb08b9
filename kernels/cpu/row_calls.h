// Calls of norms over rows: their arrays' numbers are read, and their rows shared among threads.

#pragma once

#include "rows.h"

// What all calls say. `given_up`: asked now and then by the calling thread.
struct Setting {
    const RowKernels* kernels;  // of the instruction set
    Dtype data, parameters;
    i64 rows, width;
    int threads;
    bool (*given_up)();
};

// Scale, bias and their gradients, at strides; null if absent.
struct Parameters {
    double scale_offset;
    const Array *scale, *bias, *dscale, *dbias;
};

// Each returns false if it was given up. They throw nothing but std::bad_alloc, before they write.
bool run_forward(const Setting& setting, const Parameters& parameters, const Forward& call);
bool run_gradient(const Setting& setting, const Parameters& parameters, Gradient call);
bool run_inverse(const Setting& setting, const Parameters& parameters, const Inverse& call);
