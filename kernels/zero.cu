// target = +0 over a list of tensors. Targets are written (=), never read.
//
// One list may mix f16, bf16, f32 and f64. A strided tensor's gaps stay unchanged. Deterministic.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32.

#include "list_walk.cuh"

struct Zero : Op {
    template <typename T, int N>
    __device__ __forceinline__ void fetch(Held<T, T, N>&, const T*, const T*) {}
    template <typename T, int N>
    __device__ __forceinline__ void finish(const Held<T, T, N>&, const T*, T* target) {
        const Raw<T, N> zeros = {};
        write<N>(target, zeros);
    }
};

extern "C" __global__ void __launch_bounds__(256, 3)
zero_grad(const __grid_constant__ TensorList list) {
    Zero op;
    for (u32 chunk = first_warp(); chunk < list.chunks; chunk += warps_in_grid()) walk(list, chunk, op);
}
