// The p-norm of a list of tensors, or one norm per tensor.
//
//   norm_partials: partials = one Part per chunk
//   norm_finish:   out = the norm or the norms, float64
//
// One list may mix f16, bf16, f32 and f64. -DORDER: Sum (p = 1), SumOfSquares (p = 2),
// SumOfPowers (any p), Largest (p = infinity). Every partial and every norm is written with =.
// Deterministic: what a chunk holds and the order of all additions depend only on the list and
// on norm_finish's blockDim.
//
// Launch: norm_partials with a warp per chunk, norm_finish with a block per norm; any grid,
// blockDim.x a multiple of 32.

#include "tensor_list.cuh"
#include "norm_orders.cuh"

struct Include : Op {
    static constexpr int BYTES = ORDER::BYTES, BATCH = ORDER::BATCH;
    Part part;
    double p;
    __device__ explicit Include(double p) : part{0, 0, 0}, p(p) {}
    template <typename T, int N>
    __device__ __forceinline__ void fetch(Held<T, T, N>& held, const T* source, const T*) {
        held.source = load<N>(source);
    }
    template <typename T, int N>
    __device__ __forceinline__ void finish(const Held<T, T, N>& held, T*) {
        ORDER::include(part, held.source, p);
    }
};

// Lane 0 gets the warp's Part. All lanes must call it.
__device__ __forceinline__ Part warp_part(Part part, double p) {
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        Part other;
        other.hi = __shfl_xor_sync(ALL_LANES, part.hi, offset);
        other.lo = __shfl_xor_sync(ALL_LANES, part.lo, offset);
        other.scale = __shfl_xor_sync(ALL_LANES, part.scale, offset);
        ORDER::combine(part, other, p);
    }
    return part;
}

extern "C" __global__ void __launch_bounds__(256, 3)
norm_partials(const __grid_constant__ TensorList list, double p, Part* partials) {
    for (u32 chunk = first_warp(); chunk < list.chunks; chunk += warps_in_grid()) {
        Include op(p);
        walk(list, chunk, op);
        const Part part = warp_part(op.part, p);
        if (lane() == 0) partials[chunk] = part;
    }
}

// Combines every blockDim.x-th of the partials [begin, end), which it loads BATCH at a time.
__device__ __forceinline__ Part own_share(const Part* partials, u32 begin, u32 end, double p) {
    constexpr u32 BATCH = ORDER::BATCH;
    Part sum = {0, 0, 0};
    u32 i = begin + threadIdx.x;
    for (; i + (BATCH - 1) * blockDim.x < end; i += BATCH * blockDim.x) {
        Part next[BATCH];
#pragma unroll
        for (u32 b = 0; b < BATCH; ++b) next[b] = partials[i + b * blockDim.x];
#pragma unroll
        for (u32 b = 0; b < BATCH; ++b) ORDER::combine(sum, next[b], p);
    }
    for (; i < end; i += blockDim.x) ORDER::combine(sum, partials[i], p);
    return sum;
}

// `parts` is the number of partials. With `per_tensor` there is a norm for each tensor of the
// list, otherwise one. `stride` is the distance between norms in bytes; `out` need not be aligned.
extern "C" __global__ void __launch_bounds__(1024)
norm_finish(const __grid_constant__ TensorList list, double p, const Part* partials, u32 parts,
            u32 per_tensor, unsigned char* out, i64 stride) {
    __shared__ Part shared[32];
    const u32 norms = per_tensor ? list.tensors : 1;
    for (u32 k = blockIdx.x; k < norms; k += gridDim.x) {
        const u32 begin = per_tensor ? list.at[k].first_chunk : 0;
        const u32 end = per_tensor && k + 1 < norms ? list.at[k + 1].first_chunk : parts;
        const Part part = warp_part(own_share(partials, begin, end, p), p);
        if (lane() == 0) shared[threadIdx.x / WARP] = part;
        __syncthreads();
        if (threadIdx.x == 0) {
            Part all = part;
            for (u32 w = 1; w < blockDim.x / WARP; ++w) ORDER::combine(all, shared[w], p);
            store<1>(reinterpret_cast<f64*>(out + k * stride), Pack<f64, 1>{{ORDER::norm(all, p)}});
        }
        __syncthreads();  // `shared` is read above and written in the next round
    }
}
