// Lists of gradients on a CPU: the interface that each instruction set implements.

#pragma once

#include "arrays.h"

// Represents (hi + lo) * scale^p. A scale of 0 means that all elements so far were zero. For
// p = infinity the largest magnitude is hi * scale.
struct Part {
    double hi, lo, scale;
};

// Partial results for the statistics of an array: the sums of squares and of elements, the latter of
// any sign and with a scale above 1 if the elements are large.
struct Stats {
    Part squares, sum;
    double largest;  // magnitude
    i64 zeros, nonfinite;
};

// The count of the factors of a step of AdamW, as kernels/updates.cuh has them.
constexpr int ADAMW_NUMBERS = 8;

// The factors of a step of SGD.
struct SgdFactors {
    double lr, scale, momentum, decay;
    bool nesterov, has_momenta;
};

// The source of elements' random bits: the key, and the first element's count.
struct Randomness {
    uint64_t key, counter;
};

// Elements without gaps, at any address, of the dtype by which a function is found. `to` may be
// `from`.
struct ListKernels {
    Part (*part[4])(const void* from, i64 count, double p);
    Stats (*stats[4])(const void* from, i64 count);
    void (*scale[4])(const void* from, void* to, i64 count, double factor);
    // A factor for each; where it is negative the result is +0.
    void (*scale_each[4])(const void* from, void* to, i64 count, const double* factors);
    void (*clamp[4])(const void* from, void* to, i64 count, double limit);
    // to += from * factor, of which the products are exact.
    void (*add[4])(const void* from, void* to, i64 count, double factor);
    // By way of float64: terms = scale * from; to += terms; to = terms.
    void (*terms[4])(const void* from, double* terms, i64 count, double scale);
    void (*add_terms[4])(const double* terms, void* to, i64 count);
    void (*store_terms[4])(const double* terms, void* to, i64 count);
    // to + rest += terms, as a pair; or = if `fresh`.
    void (*compensate[4])(const double* terms, void* to, void* rest, i64 count, bool fresh);
    // to = to * decay + from * (1 - decay), for a decay above 0, in the accumulation dtype.
    void (*average[4])(const void* from, void* to, i64 count, double decay);
    // next = (1 - weight) * now + weight * (batch * factor), in float64; what has no weight is left out.
    // `next` may be `now`.
    void (*move[4])(
        const void* now, const double* batch, void* next, i64 count, double factor, double weight
    );
    // Past the caches, if that is faster.
    void (*zero)(void* to, i64 bytes);
    // to += terms, or = if `fresh`, rounded by random bits; null for float32 and float64.
    void (*round_at_random[4])(
        const double* terms, void* to, i64 count, bool fresh, uint64_t key, uint64_t counter
    );
    // Steps of optimisers. Arrays are parameters, gradients and states; parameters are rounded by random
    // bits unless `random` is null.
    void (*adamw)(
        const Dtype* dtypes, char* const* at, i64 count, const double* numbers, const Randomness* random
    );
    void (*sgd)(
        const Dtype* dtypes, char* const* at, i64 count, const SgdFactors& by, const Randomness* random
    );
};

namespace baseline {
extern const ListKernels list_kernels;
}
namespace x86_64_v3 {
extern const ListKernels list_kernels;
}
namespace x86_64_v4 {
extern const ListKernels list_kernels;
}
