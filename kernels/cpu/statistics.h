// Statistics of batches: moved on, and of several ranks together.

#pragma once

#include "lists.h"
#include "numbers.h"

// One a channel.
struct Statistics {
    Numbers mean, var;
};

// next = (1 - momentum) * now + momentum * batch, whose variance is biased and that of `count`
// elements a channel. What has no weight is left out; a batch of at most one element has none.
// `next` may be `now`.
void move_statistics(
    const ListKernels& kernels, const Statistics& now, const Statistics& batch, double count,
    double momentum, const Statistics& next
);

// Combines the statistics of ranks, each of so many channels and of its count of elements a channel.
// Returns the count of all. Ranks without elements are ignored. Throws std::bad_alloc,
// before it writes.
double combine_statistics(
    const Statistics& ranks, i64 channels, const Numbers& counts, const Statistics& all
);
