// averages = decay * averages + (1 - decay) * params over a list of pairs of tensors.
//
// Sources are parameters (dtype -DGRAD), targets averages (-DBUFFER), which may be the parameters
// themselves. Computed in float, or in double for averages in double, as the nearer end plus a part of
// the difference, and rounded once. The decay is a number or read on the device: 1 keeps every bit,
// and the launch returns before it accesses any tensor; 0 copies. Deterministic: elements are
// independent.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32.

#include "tensor_list.cuh"
#include "conversions.cuh"

struct Average : ReadsBoth {
    double decay;
    __device__ explicit Average(double decay) : decay(decay) {}
    template <typename S, typename T, int N>
    __device__ __forceinline__ void finish(const Held<S, T, N>& held, const S*, T* average) {
        typedef typename Wide<T>::type A;
        Raw<T, N> result;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const A param = as<A>(widen(held.source.at(i)));
            result.put(i, narrow<T>(decay == 0 ? param : between<A>(widen(held.target.at(i)), param)));
        }
        write<N>(average, result);
    }
    // From the end that is nearer; a difference that overflows is not taken.
    template <typename A> __device__ __forceinline__ A between(A old, A param) const {
        const A step = param - old, kept = as<A>(Real<f64>{decay}), rest = as<A>(Real<f64>{1 - decay});
        const bool overflows = !((step - step).value == 0);
        if (overflows) return old * kept + param * rest;
        return decay < 0.5 ? param - step * kept : old + step * rest;
    }
};

// By *decay, or by `number` if `decay` is null.
extern "C" __global__ void __launch_bounds__(256, 2)
ema_update(const __grid_constant__ TensorList list, const double* decay, double number) {
    const double by = number_of(decay, number);
    if (by == 1) return;
    Average op(by);
    for (u32 chunk = first_warp(); chunk < list.chunks; chunk += warps_in_grid())
        walk_chunk<GRAD, BUFFER>(list, list.at[tensor_of(list, chunk)], chunk, op);
}
