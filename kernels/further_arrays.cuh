// A list of tensors that have further arrays each, beside a source and a target.
//
// With F further arrays there are n * (1 + F) tensors: the f-th further array of tensor k is the source
// of tensor n * (1 + f) + k, which has the same target. So all count elements in the order of the
// target's memory. The chunks of the first n are processed.

#pragma once

#include "tensor_list.cuh"

// The base of what a kernel does with elements: as Op, and finds elements of the further arrays. ITEMS: the
// bytes of an element of each. Packs are read of those of more than a byte, so these must then be
// aligned as the target is; the others are counters, whose addresses are their values.
template <int... ITEMS> struct FurtherOp : Op {
    static constexpr int FURTHER = sizeof...(ITEMS);
    u64 further[FURTHER + 1], origin;  // their addresses for the target's element at `origin`
    __device__ static constexpr int item(int f) {
        const int items[] = {ITEMS..., 0};
        return items[f];
    }
    template <int F, typename T> __device__ __forceinline__ u64 further_of(const T* target) const {
        return further[F] + (reinterpret_cast<u64>(target) - origin) / sizeof(T) * item(F);
    }
    // True if packs of N elements of one of them, a tensor's source, are aligned where the target's are.
    template <int N, typename T> __device__ static __forceinline__ bool packs_with(const Tensor& tensor, int f) {
        const u64 bytes = item(f);
        return tensor.dims == 0 && (bytes == 1 || (tensor.source / bytes - tensor.target / sizeof(T)) % N == 0);
    }
};

template <typename O> __device__ __forceinline__ u32 chunks_of(const TensorList& list) {
    return O::FURTHER ? list.at[list.tensors / (1 + O::FURTHER)].first_chunk : list.chunks;
}

// One warp over one chunk of a list of sources of S, targets of T and further arrays.
template <typename S, typename T, typename O>
__device__ __forceinline__ void walk_with_further(const TensorList& list, u32 chunk, O& op) {
    constexpr int WIDER = sizeof(S) > sizeof(T) ? sizeof(S) : sizeof(T), N = O::BYTES / WIDER;
    const u32 number = tensor_of(list, chunk), tensors = list.tensors / (1 + O::FURTHER);
    const Tensor& tensor = list.at[number];
    bool packs = !tensor.dims;
#pragma unroll
    for (int f = 0; f < O::FURTHER; ++f)
        packs = packs && O::template packs_with<N, T>(list.at[tensors * (1 + f) + number], f);
    if (packs) {
#pragma unroll
        for (int f = 0; f < O::FURTHER; ++f) op.further[f] = list.at[tensors * (1 + f) + number].source;
        op.origin = tensor.target;
        walk_chunk<S, T>(list, tensor, chunk, op);
        return;
    }
    const Span span = span_of<T>(list, tensor, chunk);
    for (int i = lane(); i < span.count; i += WARP) {
        const i64 element = span.first + i;
        Place at = place_of(list, tensor, element);
        if (!tensor.dims) at = {at.source + element * sizeof(S), at.target + element * sizeof(T)};
#pragma unroll
        for (int f = 0; f < O::FURTHER; ++f) {
            const Tensor& other = list.at[tensors * (1 + f) + number];
            op.further[f] = other.dims ? place_of(list, other, element).source : other.source + element * O::item(f);
        }
        op.origin = at.target;
        walk_one<S, T>(at, op);
    }
}
