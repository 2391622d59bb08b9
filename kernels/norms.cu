// Joins the partials of norm.cu into results other than one norm.
//
//   norms_finish: out = a norm per tensor times a magnitude, and found_inf, as norm_finish
//   norm_parts:   joined = the Part of the list or of each tensor, for a norm over ranks
//
// -DORDER as there. All is written with =. Deterministic: the order of all additions depends only
// on the list and on blockDim.
//
// Launch: a block per norm, any grid, blockDim.x a power of two from 32 on.

#include "norm_parts.cuh"

// Thread 0 gets the Part of norm k: of a tensor's partials, or of all `parts` of them. All threads
// must call it.
__device__ __forceinline__ Part part_of_norm(const TensorList& list, const Part* partials, u32 parts,
                                             u32 k, bool per_tensor, double p) {
    const u32 begin = per_tensor ? list.at[k].first_chunk : 0;
    const u32 end = per_tensor && k + 1 < list.tensors ? list.at[k + 1].first_chunk : parts;
    return block_part(own_share(partials, begin, end, p), p);
}

// A norm for each tensor of the list. `stride` is the distance between norms in bytes; of
// `found_inf` there is a number for each.
extern "C" __global__ void __launch_bounds__(1024)
norms_finish(const __grid_constant__ TensorList list, double p, const Part* partials, u32 parts,
             const double* scale, double number, unsigned char* out, i64 stride, double* found_inf) {
    const double by = fabs(number_of(scale, number));
    for (u32 k = blockIdx.x; k < list.tensors; k += gridDim.x) {
        const Part all = part_of_norm(list, partials, parts, k, true, p);
        if (threadIdx.x == 0) write_joined_norm(all, p, by, out + k * stride, found_inf ? found_inf + k : nullptr);
    }
}

// `parts` is the number of partials. With `per_tensor` there is a sum for each tensor of the list,
// otherwise one. Each is divided by copies[k]; `copies` may be null. As norms, without the root.
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
