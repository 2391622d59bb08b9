// buffer += scale * grad, or buffer = grad, with grad broadcast to the buffer's shape.
//
// The list holds one tensor: its source is the gradient (dtype -DGRAD), its target the buffer
// (-DBUFFER), which may be the gradient itself. With a scale, computed in double: the product is
// rounded, then the sum, then the sum to BUFFER. An unscaled sum of f32 and narrower is rounded
// once. The flag is read on the device. Deterministic: each element on its own.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32.

#include "tensor_list.cuh"

// If the types agree, every bit is kept.
template <typename S, typename T> struct Convert {
    __device__ static __forceinline__ T apply(S x) {
        if constexpr (sizeof(T) == 8) return to_double(x);
        else return narrow<T>(widen(x));
    }
};
template <typename T> struct Convert<T, T> {
    __device__ static __forceinline__ T apply(T x) { return x; }
};

// Sums rounded once, without double precision, of which many GPUs have little.
template <typename S, typename T, int N>
__device__ __forceinline__ Raw<T, N> sum_of_floats(const Held<S, T, N>& held) {
    Real<f32> sums[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const Real<f32> buffer = widen(held.target.at(i)), grad = widen(held.source.at(i));
        if constexpr (sizeof(T) == 4) sums[i] = buffer + grad;
        else sums[i] = {to_odd(sum_with_error(buffer.value, grad.value))};
    }
    return narrow_all<T>(sums);
}

struct Add : Op {
    double scale;
    __device__ explicit Add(double scale) : scale(scale) {}
    template <typename S, typename T, int N>
    __device__ __forceinline__ void fetch(Held<S, T, N>& held, const S* grad, const T* buffer) {
        held.source = load<N>(grad);
        held.target = load<N>(buffer);
    }
    template <typename S, typename T, int N>
    __device__ __forceinline__ void finish(const Held<S, T, N>& held, const S*, T* buffer) {
        if constexpr (sizeof(S) < 8 && sizeof(T) < 8)
            if (scale == 1) return write<N>(buffer, sum_of_floats(held));
        Raw<T, N> result;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const double term = __dmul_rn(to_double(held.source.at(i)), scale);
            result.put(i, narrow<T>(__dadd_rn(to_double(held.target.at(i)), term)));
        }
        write<N>(buffer, result);
    }
};

struct Overwrite : Op {
    template <typename S, typename T, int N>
    __device__ __forceinline__ void fetch(Held<S, T, N>& held, const S* grad, const T*) {
        held.source = load<N>(grad);
    }
    template <typename S, typename T, int N>
    __device__ __forceinline__ void finish(const Held<S, T, N>& held, const S*, T* buffer) {
        Raw<T, N> result;
#pragma unroll
        for (int i = 0; i < N; ++i) result.put(i, Convert<S, T>::apply(held.source.at(i)));
        write<N>(buffer, result);
    }
};

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
