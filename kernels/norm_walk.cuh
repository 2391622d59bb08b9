// Computes a chunk's partial result of a norm, for -DORDER.

#pragma once

#include "list_walk.cuh"
#include "norm_parts.cuh"

struct Include : ReadsSource {
    static constexpr int BYTES = ORDER::BYTES, BATCH = ORDER::BATCH;
    Share share;
    double p;
    __device__ explicit Include(double p) : share{}, p(p) {}
    template <typename T, int N>
    __device__ __forceinline__ void finish(const Held<T, T, N>& held, const T*, T*) {
        const Held<T, T, N> one[1] = {held};
        ORDER::include(share, one, p);
    }
    __device__ __forceinline__ void rest() {
        if (ORDER::WAITS) add_waiting(share);
    }
};

// All that a lane holds is included at once; zeros add nothing.
template <typename T, int N>
__device__ __forceinline__ void finish_all(Include& op, const Held<T, T, N> (&held)[Include::BATCH], const T*, T*, int) {
    ORDER::include(op.share, held, op.p);
}
