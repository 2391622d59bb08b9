// buffer += scale * grad, or buffer = grad, with grad broadcast to the buffer's shape.
//
// The list has one tensor: its source is the gradient (dtype -DGRAD), its target the buffer (dtype
// -DBUFFER), which may be the gradient itself. The flag is read on the device. Deterministic:
// elements are independent.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32.

#include "accumulation.cuh"

template <typename O> __device__ __forceinline__ void apply(const TensorList& list, O op) {
    for (u32 chunk = first_warp(); chunk < list.chunks; chunk += warps_in_grid())
        walk_chunk<GRAD, BUFFER>(list, list.at[0], chunk, op);
}

// += if *do_update; a null `do_update` counts as true.
extern "C" __global__ void __launch_bounds__(256, 2)
accumulate_grad(const __grid_constant__ TensorList list, const unsigned char* do_update, double scale) {
    if (!do_update || *do_update) apply(list, Add(scale));
}

// = if *overwrite, else +=; if `overwrite` is null, `otherwise` is the flag.
extern "C" __global__ void __launch_bounds__(256, 2)
accumulate_grad_v2(const __grid_constant__ TensorList list, const unsigned char* overwrite, u32 otherwise) {
    if (overwrite ? *overwrite : otherwise) apply(list, Overwrite());
    else apply(list, Add(1));
}
