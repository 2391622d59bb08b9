// buffers += scale * grads, or buffers = scale * grads, over a list of pairs of tensors.
//
// Sources are gradients (dtype -DGRAD), targets buffers (-DBUFFER), which may be the
// gradients themselves. Results are those of accumulate.cu; a product without a sum is rounded once
// from double. With a scale of 0 sources are not read: targets stay, or become +0. -DNORM=1: also
// writes a Part of the 2-norm of the resulting buffers, for the chunks that a block processes at once;
// it has the same bits as norm_partials of norm.cu if sources and targets are contiguous and aligned
// together. Flags and scale are read on the device.
// Deterministic.
//
// Launch: a warp per chunk, any grid, blockDim.x a power of two from 32 on.

#include "accumulation.cuh"

#if NORM
#define ORDER SumOfSquares
#include "norm_parts.cuh"
#endif

// What a call does to a buffer. SET adds to -0, which is the product itself.
enum Change { ADD, SET, COPY, KEEP };

struct Clear : Op {
    template <typename S, typename T, int N>
    __device__ __forceinline__ void fetch(Held<S, T, N>&, const S*, const T*) {}
    template <typename S, typename T, int N>
    __device__ __forceinline__ void finish(const Held<S, T, N>&, const S*, T* buffer) {
        write<N>(buffer, Raw<T, N>{});
    }
};

// Buffers overwritten by gradients without weight. By itself: in the loop of the others it would cost
// them loads in flight.
__device__ __noinline__ void clear(const TensorList& list, double* partials) {
    Clear op;
    for (u32 chunk = first_warp(); chunk < list.chunks; chunk += warps_in_grid()) {
        walk_chunk<GRAD, BUFFER>(list, list.at[tensor_of(list, chunk)], chunk, op);
#if NORM
        if (threadIdx.x == 0) reinterpret_cast<Part*>(partials)[chunk / (blockDim.x / WARP)] = {0, 0, 0};
#endif
    }
}

struct Accumulate : Add {
    Change change;
#if NORM
    Share share;
    __device__ Accumulate(double scale, Change change) : Add(scale), change(change), share{} {}
#else
    __device__ Accumulate(double scale, Change change) : Add(scale), change(change) {}
#endif
    template <typename S, typename T, int N>
    __device__ __forceinline__ void fetch(Held<S, T, N>& held, const S* grad, const T* buffer) {
        if (change != KEEP) held.source = load<N>(grad);
        if (change == ADD || change == KEEP) {
            held.target = load<N>(buffer);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) held.target.put(i, narrow<T>(-0.0));
        }
    }
    // Writes N results and returns them.
    template <typename S, typename T, int N>
    __device__ __forceinline__ Raw<T, N> put(const Held<S, T, N>& held, T* buffer) {
        if (change == KEEP) return held.target;
        const Raw<T, N> result = change == COPY ? converted(held) : result_of(held);
        write<N>(buffer, result);
        return result;
    }
    template <typename S, typename T, int N>
    __device__ __forceinline__ void finish(const Held<S, T, N>& held, const S*, T* buffer) {
        const Raw<T, N> result = put(held, buffer);
#if NORM
        const Held<T, T, N> one[1] = {{result, {}}};
        SumOfSquares::include(share, one, 2);
#endif
    }
#if NORM
    __device__ __forceinline__ void rest() { add_waiting(share); }
#endif
};

#if NORM
// All that a lane holds is included at once, as by norm_partials; zeros add nothing.
template <typename S, typename T, int N>
__device__ __forceinline__ void finish_all(
    Accumulate& op, const Held<S, T, N> (&held)[Accumulate::BATCH], const S*, T* target, int count
) {
    Held<T, T, N> results[Accumulate::BATCH] = {};
#pragma unroll
    for (int b = 0; b < Accumulate::BATCH; ++b)
        if (b < count) results[b].source = op.put(held[b], target + b * WARP * N);
    SumOfSquares::include(op.share, results, 2);
}
#endif

// Each flag is read from its array, or is the number behind it if that is null; so is the scale.
extern "C" __global__ void __launch_bounds__(256, 2)
accumulate_grads(const __grid_constant__ TensorList list, const unsigned char* do_update, u32 updates,
                 const unsigned char* overwrite, u32 overwrites, const double* scale, double number,
                 double* partials) {
    const double by = number_of(scale, number);
    const bool fresh = flag_of(overwrite, overwrites), weightless = by == 0;
    const bool kept = !flag_of(do_update, updates) || (weightless && !fresh);
    if (weightless && !kept) return clear(list, partials);
    const Change change = kept ? KEEP : !fresh ? ADD : by == 1 ? COPY : SET;
    const auto take = [&](Accumulate& op, u32 chunk) {
        walk_chunk<GRAD, BUFFER>(list, list.at[tensor_of(list, chunk)], chunk, op);
    };
#if NORM
    write_parts(list, 2, reinterpret_cast<Part*>(partials), true, [&](u32 chunk) {
        Accumulate op(by, change);
        take(op, chunk);
        return part_of(op.share);
    });
#else
    if (change == KEEP) return;
    Accumulate op(by, change);
    for (u32 chunk = first_warp(); chunk < list.chunks; chunk += warps_in_grid()) take(op, chunk);
#endif
}
