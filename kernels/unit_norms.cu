// The p-norm of each unit of a list of gradients: of rows, of columns, or of whole gradients.
//
//   unit_norm_partials: partials = one Part per chunk
//   unit_norm_finish:   norms = a norm per unit, or with `mean` the root of the mean of powers (for
//                       p = 2, the root mean square), float64
//
// -DORDER as for norm.cu, and one list may mix dtypes. Every partial and every norm is written with
// =. Deterministic: the elements of a chunk and the order of all additions depend only on the list,
// on its addresses modulo 16, and on blockDim.
//
// Launch: unit_norm_partials with a warp per chunk, unit_norm_finish with a block per unit; any
// grid, blockDim.x a power of two from 32 on.

#include "unit_list.cuh"
#include "norm_walk.cuh"

extern "C" __global__ void __launch_bounds__(256, 2)
unit_norm_partials(const __grid_constant__ TensorList list, double p, Part* partials) {
    write_parts(list, p, partials, false, [&](u32 chunk) {
        Include op(p);
        walk_tensor(list, unit_of(list, chunk).tensor, chunk, op);
        return part_of(op.share);
    });
}

// `end` is one more than the last unit of the list, whose first is that of its first tensor.
extern "C" __global__ void __launch_bounds__(256)
unit_norm_finish(const __grid_constant__ TensorList list, double p, const Part* partials, u32 mean,
                 u32 end, double* norms) {
    for (u32 unit = list.at[0].first_unit + blockIdx.x; unit < end; unit += gridDim.x) {
        const u32 at = last_tensor(list, [=](const Tensor& tensor) { return tensor.first_unit <= unit; });
        const Tensor tensor = list.at[at];
        const u32 stop = at + 1 < list.tensors ? list.at[at + 1].first_chunk : list.chunks;
        const u32 first = tensor.first_chunk + unit - tensor.first_unit;
        Part all = block_part(own_share(partials, first, stop, p, tensor.units), p);
        if (threadIdx.x != 0) continue;
        if (mean && tensor.count > 0) ORDER::divide(all, static_cast<double>(tensor.count));
        norms[unit] = norm_of<ORDER>(all, p, 1);
    }
}
