// A list of tensors that have a third array each.
//
// Its tensors are twice as many: tensor n + k, of 2 n, has the third array of tensor k as its source,
// and the same target. So both count elements in the order of the target's memory. The chunks of the
// first n are processed.

#pragma once

#include "tensor_list.cuh"

// The base of what a kernel does with elements: as Op, and finds an element of the third array.
// ITEM: its bytes. IN_STEP: packs are read of it too, so it must be aligned as the target is.
template <int ITEM, bool IN_STEP> struct ThreeOp : Op {
    static constexpr int ITEM_BYTES = ITEM;
    u64 third, origin;  // the third array's address for the target's element at `origin`
    template <typename T> __device__ __forceinline__ u64 third_of(const T* target) const {
        return third + (reinterpret_cast<u64>(target) - origin) / sizeof(T) * ITEM;
    }
    __device__ static __forceinline__ bool packs_with(const Tensor& tensor) {
        return tensor.dims == 0 && !(IN_STEP && (tensor.source - tensor.target) % Op::BYTES);
    }
};

__device__ __forceinline__ u32 chunks_of_three(const TensorList& list) {
    return list.at[list.tensors / 2].first_chunk;
}

// One warp over one chunk of a list of sources of S, targets of T and third arrays.
template <typename S, typename T, typename O>
__device__ __forceinline__ void walk_three(const TensorList& list, u32 chunk, O& op) {
    const u32 number = tensor_of(list, chunk);
    const Tensor& tensor = list.at[number];
    const Tensor& other = list.at[list.tensors / 2 + number];
    if (!tensor.dims && op.packs_with(other)) {
        op.third = other.source;
        op.origin = tensor.target;
        walk_chunk<S, T>(list, tensor, chunk, op);
        return;
    }
    const Span span = span_of<T>(list, tensor, chunk);
    for (int i = lane(); i < span.count; i += WARP) {
        const i64 element = span.first + i;
        Place at = place_of(list, tensor, element);
        if (!tensor.dims) at = {at.source + element * sizeof(S), at.target + element * sizeof(T)};
        op.third = other.dims ? place_of(list, other, element).source : other.source + element * O::ITEM_BYTES;
        op.origin = at.target;
        walk_one<S, T>(at, op);
    }
}
