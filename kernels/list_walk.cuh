// One warp over one chunk of a list whose tensors tell their dtypes.
//
// -DLIST_T: the dtype of all tensors, if they have the same one, as in most lists; a kernel for it
// alone compiles in a third of the time. Without it one launch serves all dtypes: a model's gradients
// are often bf16 with a few f32 ones, and a launch costs more than a switch, which a whole warp takes
// the same way.

#pragma once

#include "tensor_list.cuh"

#ifdef LIST_T
template <typename T> constexpr bool LISTED = false;
template <> constexpr bool LISTED<LIST_T> = true;
#else
#define SEVERAL_DTYPES
template <typename T> constexpr bool LISTED = true;
#endif

template <typename O>
__device__ __forceinline__ void walk_tensor(const TensorList& list, const Tensor& tensor, u32 chunk, O& op) {
#define WALK_AS(number, T, A) \
    case number: \
        if constexpr (LISTED<T>) return walk_chunk<T, T>(list, tensor, chunk, op); \
        break;
    switch (tensor.dtype) { FOR_EACH_DTYPE(WALK_AS) }
#undef WALK_AS
    __trap();  // a dtype without a row, or one that was not to be in this list
}

template <typename O> __device__ __forceinline__ void walk(const TensorList& list, u32 chunk, O& op) {
    const Tensor tensor = list.at[tensor_of(list, chunk)];
    walk_tensor(list, tensor, chunk, op);
}
