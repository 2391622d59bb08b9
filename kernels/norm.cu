// The p-norm of a list of tensors.
//
//   norm_partials: partials = one Part per chunk, or for the chunks of a block
//   norm_finish:   out = the norm times a magnitude, float64; found_inf = whether elements are NaN
//                  or infinite, 0 or 1, float64
//
// One list may mix f16, bf16, f32 and f64. -DORDER: Sum (p = 1), SumOfSquares (p = 2), SumOfPowers
// (any p), Largest (p = infinity). Every partial and every norm is written with =. Deterministic:
// the elements of a chunk and the order of all additions depend only on the list, on its addresses
// modulo 16, and on blockDim.
//
// Launch: norm_partials with a warp per chunk and any grid, norm_finish with one block; blockDim.x a
// power of two from 32 on. What joins partials otherwise is in norms.cu, for which a first clip need not wait.

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

// The norm of all `parts` partials times |*scale|, or times |number| if `scale` is null.
// `found_inf` may be null.
extern "C" __global__ void __launch_bounds__(1024)
norm_finish(double p, const Part* partials, u32 parts, const double* scale, double number,
            unsigned char* out, double* found_inf) {
    const Part all = block_part(own_share(partials, 0, parts, p), p);
    if (threadIdx.x == 0) write_joined_norm(all, p, fabs(number_of(scale, number)), out, found_inf);
}
