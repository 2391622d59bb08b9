// The elements of a gradient multiplied by a coefficient.

#pragma once

#include "list_walk.cuh"
#include "products.cuh"

// Each element is multiplied, or keeps every bit, or becomes +0.
enum Change { MULTIPLY, KEEP, ZERO };

struct Scale : ReadsSource {
    Factor factor;
    Change change;
    __device__ Scale(double factor, Change change) : factor(factor), change(change) {}
    template <typename T, int N>
    __device__ __forceinline__ void finish(const Held<T, T, N>& held, const T* source, T* target) {
        Raw<T, N> result = {};
        if (change == KEEP) result = held.source;
        if (change == MULTIPLY && !multiply(held.source, factor, result)) finish_each<N>(source, target);
        else write<N>(target, result);
    }
    // One by one in double, and from memory again: it is rare, and so it takes little code.
    template <int N, typename T> __device__ __forceinline__ void finish_each(const T* source, T* target) {
#pragma unroll 1
        for (int i = 0; i < N; ++i)
            write<1>(target + i, Raw<T, 1>{{multiply_in_double(load<1>(source + i).at(0), factor)}});
    }
};

// A list, the last chunk first.
__device__ __forceinline__ void scale_all(const TensorList& list, double factor, bool zero, bool in_place) {
    if (in_place && factor == 1 && !zero) return;
    Scale op(factor, zero ? ZERO : factor == 1 ? KEEP : MULTIPLY);
    for (u32 k = first_warp(); k < list.chunks; k += warps_in_grid())
        walk(list, list.chunks - 1 - k, op);
}
