// Calls of norms over channels: where their arrays lie, and how they are shared among threads.

#pragma once

#include "channels.h"
#include "lists.h"
#include "numbers.h"
#include "pool.h"

// An array at any strides.
struct View {
    char* data = nullptr;
    Axes axes;  // all of them
};

enum class Reads { NOTHING, DEVIATIONS, PRODUCTS };
enum class Writes { NOTHING, NORMALISED, DIFFERENTIATED, MULTIPLIED };

// One call. A gradient's statistics are `mean` and `inv_std` or, with an eps, `var`; those of a batch
// norm by known statistics are `mean` and `var`. Given sums are divided by `count`. `mean` + `rest`
// is the mean with the precision of two float64. A slice of a group adds the sums of products, times
// scale, to those of other slices.
struct ChannelCall {
    const ChannelKernels<float>* f32;  // of the instruction set; of f16, bf16 and f32
    const ChannelKernels<double>* f64;
    const ListKernels* lists;
    int threads;
    Patience* patience;  // of all slices

    Reads reads;
    Writes writes;
    Dtype dtype;        // of the data
    int axis;           // of the channels
    i64 channels;       // of all slices
    i64 groups;         // of each sample, whose axis is the first; 0 of a batch norm
    View dy, x, out;    // y or dx
    Numbers scale, bias, mean, rest, inv_std, var, of_product, of_dy;
    double eps, count;
    Numbers saved_mean, saved_rest, saved_inv_std, saved_var, sum_product, sum_dy;
    Numbers slice_product, slice_dy;
    Numbers running_mean, running_var;
    double momentum;
};

// Returns false if it was given up. Throws nothing but std::bad_alloc.
bool run_channels(const ChannelCall& call);
