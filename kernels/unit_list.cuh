// A list of gradients that are processed unit by unit. A unit is a whole gradient, or the elements
// at one index along the axes that a norm does not sum over: a row, a column, a filter.
//
// A tensor of the list has `units` units of `count` elements each. Its chunks are assigned to the
// units cyclically, so that if units are columns, the warps of a block share the data of each load.

#pragma once

#define UNITS
#include "tensor_list.cuh"

struct Unit {
    Tensor tensor;  // as if the tensor had no other unit
    u32 index;      // in the whole list
};

// The unit that a chunk belongs to. All lanes of a warp must call it with the same chunk.
__device__ __forceinline__ Unit unit_of(const TensorList& list, u32 chunk) {
    Tensor tensor = list.at[tensor_of(list, chunk)];
    const u32 place = chunk - tensor.first_chunk, unit = place % tensor.units;
    tensor.source += unit * tensor.source_step;
    tensor.target += unit * tensor.target_step;
    tensor.first_chunk = chunk - place / tensor.units;
    return {tensor, tensor.first_unit + unit};
}
