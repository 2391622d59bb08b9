// The p-norm of a list of tensors, or one norm per tensor.
//
//   norm_partials: partials = one Part per chunk, or for the chunks of a block
//   norm_finish:   out = the norm or the norms times a magnitude, float64; found_inf = whether
//                  elements are NaN or infinite, 0 or 1, float64
//   norm_parts:    joined = the Part of the list or of each tensor, for a norm over ranks
//
// One list may mix f16, bf16, f32 and f64. -DORDER: Sum (p = 1), SumOfSquares (p = 2), SumOfPowers
// (any p), Largest (p = infinity). Every partial and every norm is written with =. Deterministic:
// the elements of a chunk and the order of all additions depend only on the list, on its addresses
// modulo 16, and on blockDim.
//
// Launch: norm_partials with a warp per chunk, the others with a block per norm; any grid,
// blockDim.x a multiple of 32.

#include "norm_walk.cuh"

// Blocks for each multiprocessor: on older ones a third takes more registers than there are.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#define RESIDENT 2
#else
#define RESIDENT 3
#endif

extern "C" __global__ void __launch_bounds__(256, RESIDENT)
norm_partials(const __grid_constant__ TensorList list, double p, Part* partials, u32 joined) {
    write_parts(list, p, partials, joined, [&](u32 chunk) {
        Include op(p);
        walk(list, chunk, op);
        return part_of(op.share);
    });
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

// Thread 0 gets the Part of norm k: of a tensor's partials, or of all `parts` of them. All threads
// must call it.
__device__ __forceinline__ Part part_of_norm(const TensorList& list, const Part* partials, u32 parts,
                                             u32 k, bool per_tensor, double p) {
    const u32 begin = per_tensor ? list.at[k].first_chunk : 0;
    const u32 end = per_tensor && k + 1 < list.tensors ? list.at[k + 1].first_chunk : parts;
    return block_part(own_share(partials, begin, end, p), p);
}

// `parts` is the number of partials. With `per_tensor` there is a norm for each tensor of the
// list, otherwise one. `stride` is the distance between norms in bytes; `out` need not be aligned.
// They are multiplied by |*scale|, or by |number| if `scale` is null. `found_inf`, a number for
// each norm, may be null.
extern "C" __global__ void __launch_bounds__(1024)
norm_finish(const __grid_constant__ TensorList list, double p, const Part* partials, u32 parts,
            u32 per_tensor, const double* scale, double number, unsigned char* out, i64 stride,
            double* found_inf) {
    const double by = fabs(number_of(scale, number));
    const u32 norms = per_tensor ? list.tensors : 1;
    for (u32 k = blockIdx.x; k < norms; k += gridDim.x) {
        const Part all = part_of_norm(list, partials, parts, k, per_tensor, p);
        if (threadIdx.x != 0) continue;
        write<1>(reinterpret_cast<f64*>(out + k * stride), Raw<f64, 1>{{norm_of<ORDER>(all, p, by)}});
        if (found_inf) found_inf[k] = fabs(all.hi) <= LARGEST ? 0 : 1;  // no sum overflows
    }
}

// As norm_finish, without the root. Each sum is divided by copies[k]; `copies` may be null.
extern "C" __global__ void __launch_bounds__(1024)
norm_parts(const __grid_constant__ TensorList list, double p, const Part* partials, u32 parts,
           u32 per_tensor, const double* copies, Part* joined) {
    const u32 norms = per_tensor ? list.tensors : 1;
    for (u32 k = blockIdx.x; k < norms; k += gridDim.x) {
        Part all = part_of_norm(list, partials, parts, k, per_tensor, p);
        if (threadIdx.x != 0) continue;
        if (copies) ORDER::divide(all, copies[k]);
        joined[k] = {all.hi, fabs(all.hi) <= LARGEST ? all.lo : 0, all.scale};
    }
}
