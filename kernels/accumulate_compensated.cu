// buffers += scale * grads, or buffers = scale * grads, with what the buffers drop in further arrays.
//
// Sources are gradients (dtype -DGRAD), targets buffers (-DBUFFER), which may be the gradients
// themselves; the further arrays, `rests`, are of the buffers' dtype and written too. With
// change = rest + scale * grad, sum = buffer + change: buffer = sum rounded, rest = sum - buffer
// rounded, or 0 if the buffer is not finite. All in double, by Knuth's two-sum, and with the bits of
// the CPU backends. To overwrite, both were -0. With a scale of 0 gradients are left out. Flags and
// scale are read on the device. Deterministic: elements are independent.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32.

#include "accumulation.cuh"
#include "further_arrays.cuh"

struct Compensate : FurtherOp<sizeof(BUFFER)> {
    double scale;
    bool fresh;
    template <typename S, typename T, int N>
    __device__ __forceinline__ void fetch(Held<S, T, N>& held, const S* grad, const T* buffer) {
        held.source = load<N>(grad);
        held.target = load_unless<N>(fresh, buffer);
    }
    template <int N, typename T> __device__ __forceinline__ Raw<T, N> rest_of(const T* buffer) const {
        return load_unless<N>(fresh, reinterpret_cast<const T*>(further_of<0>(buffer)));
    }
    template <typename S, typename T, int N>
    __device__ __forceinline__ void put(const Held<S, T, N>& held, Raw<T, N> rest, T* buffer) {
        Raw<T, N> sums;
        const Raw<S, N> source = none_if(scale == 0, held.source);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const double term = __dmul_rn(to_double(source.at(i)), scale);
            const double change = __dadd_rn(to_double(rest.at(i)), term), before = to_double(held.target.at(i));
            sums.put(i, narrow<T>(__dadd_rn(before, change)));
            const double after = to_double(sums.at(i)), moved = after - before;
            const double dropped = (before - (after - moved)) + (change - moved);
            rest.put(i, narrow<T>(after - after == 0 ? dropped : 0.0));
        }
        write<N>(buffer, sums);
        write<N>(reinterpret_cast<T*>(further_of<0>(buffer)), rest);
    }
    template <typename S, typename T, int N>
    __device__ __forceinline__ void finish(const Held<S, T, N>& held, const S*, T* buffer) {
        put(held, rest_of<N>(buffer), buffer);
    }
};

// All that a lane holds is completed before the first store.
template <typename S, typename T, int N>
__device__ __forceinline__ void finish_all(
    Compensate& op, const Held<S, T, N> (&held)[Compensate::BATCH], const S*, T* target, int count
) {
    Raw<T, N> rests[Compensate::BATCH] = {};
#pragma unroll
    for (int b = 0; b < Compensate::BATCH; ++b)
        if (b < count) rests[b] = op.rest_of<N>(target + b * WARP * N);
#pragma unroll
    for (int b = 0; b < Compensate::BATCH; ++b)
        if (b < count) op.put(held[b], rests[b], target + b * WARP * N);
}

// Each flag is read from its array, or is the number behind it if that is null; so is the scale.
extern "C" __global__ void __launch_bounds__(256, 2)
accumulate_compensated(const __grid_constant__ TensorList list, const unsigned char* do_update, u32 updates,
                       const unsigned char* overwrite, u32 overwrites, const double* scale, double number) {
    if (!flag_of(do_update, updates)) return;
    Compensate op;
    const double by = number_of(scale, number);
    op.scale = by == 0 ? 0 : by;  // a product of +0 with it is what is left out
    op.fresh = flag_of(overwrite, overwrites);
    if (op.scale == 0 && !op.fresh) return;
    for (u32 chunk = first_warp(); chunk < chunks_of<Compensate>(list); chunk += warps_in_grid())
        walk_with_further<GRAD, BUFFER>(list, chunk, op);
}
