// target = min(max(source, -limit), limit) over a list of pairs of tensors; NaN stays NaN.
//
// One list may mix f16, bf16, f32 and f64. Elements within the limits keep every bit. The limit is
// rounded to f32 (not for f64), and a replaced element to its own dtype. Targets are written with
// =. Deterministic: elements are independent.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32.

#include "list_walk.cuh"

struct Clamp : ReadsSource {
    double limit;
    __device__ explicit Clamp(double limit) : limit(limit) {}
    template <typename T, int N>
    __device__ __forceinline__ void finish(const Held<T, T, N>& held, const T*, T* target) {
        Raw<T, N> result = held.source;
#pragma unroll
        for (int i = 0; i < N; ++i) result.put(i, clamped(held.source.at(i)));
        write<N>(target, result);
    }
    template <typename T> __device__ __forceinline__ T clamped(T x) const {
        if constexpr (sizeof(T) == 8) {
            return x > limit ? limit : x < -limit ? -limit : x;
        } else {
            // Bits without a sign are in the order of magnitudes, and NaN lies above infinity. As
            // floats, subnormals would count as 0.
            const u32 bits = __float_as_uint(widen(x).value), magnitude = bits & 0x7fffffffu;
            const u32 top = __float_as_uint(rounded(limit));
            if (magnitude <= top || magnitude > 0x7f800000u) return x;
            return narrow<T>(__uint_as_float(top | (bits & 0x80000000u)));
        }
    }
};

extern "C" __global__ void __launch_bounds__(256, 3)
clip_grad_value(const __grid_constant__ TensorList list, double limit) {
    Clamp op(limit);
    for (u32 chunk = first_warp(); chunk < list.chunks; chunk += warps_in_grid()) walk(list, chunk, op);
}
