// target = min(max(source, -limit), limit) over a list of pairs of tensors; NaN stays NaN.
//
// One list may mix f16, bf16, f32 and f64. Elements within the limits keep every bit. The limit
// is rounded to f32 (not for f64), and a replaced element to its own dtype. Targets are written
// with =. Deterministic: each element on its own.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32.

#include "tensor_list.cuh"

struct Clamp : Op {
    double limit;
    __device__ explicit Clamp(double limit) : limit(limit) {}
    template <typename T, int N>
    __device__ __forceinline__ void fetch(Held<T, T, N>& held, const T* source, const T*) {
        held.source = load<N>(source);
    }
    template <typename T, int N>
    __device__ __forceinline__ void finish(const Held<T, T, N>& held, T* target) {
        const double top = sizeof(T) == 8 ? limit : exactly(rounded(limit));
        Pack<T, N> result = held.source;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const double x = to_double(held.source.at[i]);
            if (x > top) result.at[i] = narrow<T>(top);
            if (x < -top) result.at[i] = narrow<T>(-top);
        }
        store<N>(target, result);
    }
};

extern "C" __global__ void __launch_bounds__(256, 3)
clip_grad_value(const __grid_constant__ TensorList list, double limit) {
    Clamp op(limit);
    for (u32 chunk = first_warp(); chunk < list.chunks; chunk += warps_in_grid()) walk(list, chunk, op);
}
