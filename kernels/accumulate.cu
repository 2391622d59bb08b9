// buffer += scale * grad, or buffer = grad, with grad broadcast to the buffer's shape.
//
// The list holds one tensor, whose source is the gradient (-DGRAD) and whose target is the
// buffer (-DBUFFER). Computed in double: the product rounds there, then the sum, and the sum
// once more to BUFFER; unscaled sums of f32 and narrower come out as if rounded once. The flag
// is read on the device. A warp a chunk, any grid, blockDim.x a multiple of 32. The buffer may
// be the gradient itself.

#include "tensor_list.cuh"

// Where the types agree every bit is kept.
template <typename S, typename T> struct Convert {
    __device__ static __forceinline__ T apply(S x) { return narrow<T>(to_double(x)); }
};
template <typename T> struct Convert<T, T> {
    __device__ static __forceinline__ T apply(T x) { return x; }
};

struct Add : Op {
    double scale;
    __device__ explicit Add(double scale) : scale(scale) {}
    template <typename S, typename T, int N>
    __device__ __forceinline__ void fetch(Held<S, T, N>& held, const S* grad, const T* buffer) {
        held.source = load<N>(grad);
        held.target = load<N>(buffer);
    }
    template <typename S, typename T, int N>
    __device__ __forceinline__ void finish(const Held<S, T, N>& held, T* buffer) {
        Pack<T, N> result;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const double term = __dmul_rn(to_double(held.source.at[i]), scale);
            result.at[i] = narrow<T>(__dadd_rn(to_double(held.target.at[i]), term));
        }
        store<N>(buffer, result);
    }
};

struct Overwrite : Op {
    template <typename S, typename T, int N>
    __device__ __forceinline__ void fetch(Held<S, T, N>& held, const S* grad, const T*) {
        held.source = load<N>(grad);
    }
    template <typename S, typename T, int N>
    __device__ __forceinline__ void finish(const Held<S, T, N>& held, T* buffer) {
        Pack<T, N> result;
#pragma unroll
        for (int i = 0; i < N; ++i) result.at[i] = Convert<S, T>::apply(held.source.at[i]);
        store<N>(buffer, result);
    }
};

template <typename O> __device__ __forceinline__ void apply(const TensorList& list, O op) {
    for (u32 chunk = first_warp(); chunk < list.chunks; chunk += warps_in_grid())
        walk_chunk<GRAD, BUFFER>(list, list.at[0], chunk, op);
}

// += unless *do_update is false; a null `do_update` is true.
extern "C" __global__ void __launch_bounds__(256, 2)
accumulate_grad(const __grid_constant__ TensorList list, const unsigned char* do_update, double scale) {
    if (!do_update || *do_update) apply(list, Add(scale));
}

// = where *overwrite, += where not; a null `overwrite` is `otherwise`.
extern "C" __global__ void __launch_bounds__(256, 2)
accumulate_grad_v2(const __grid_constant__ TensorList list, const unsigned char* overwrite, u32 otherwise) {
    if (overwrite ? *overwrite : otherwise) apply(list, Overwrite());
    else apply(list, Add(1));
}
