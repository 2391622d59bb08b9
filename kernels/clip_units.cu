// target = source * coefficient over a list of gradients, with a coefficient for each unit.
//
// A unit whose norm exceeds its limit is scaled to it: `limit`, or `limit` times the norm of the
// parameters that the unit belongs to (adaptive clipping). Results are those of a product in
// double, rounded once. A coefficient of 1 keeps every bit; in place, such a unit is not accessed.
// Targets are written with =. Deterministic: elements are independent.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32. The last chunk is processed
// first, because the data that the norms read last are still in L2.

#include "unit_list.cuh"
#include "clip_coefficient.cuh"
#include "scaling.cuh"

// With *max_norm, or `limit` if `max_norm` is null; times max(param_norms[unit], least) unless that
// is null. `zero_nonfinite`: where a unit's norm is NaN or infinite, its elements become +0.
extern "C" __global__ void __launch_bounds__(256, 3)
clip_units(const __grid_constant__ TensorList list, const double* norms, const double* max_norm, double limit,
           const double* param_norms, double least, double eps, u32 zero_nonfinite, u32 in_place) {
    const double common = number_of(max_norm, limit);
    for (u32 k = first_warp(); k < list.chunks; k += warps_in_grid()) {
        const u32 chunk = list.chunks - 1 - k;
        const Unit unit = unit_of(list, chunk);
        double largest = common;
        if (param_norms) {
            const double size = param_norms[unit.index];
            largest *= size < least ? least : size;  // NaN stays NaN
        }
        const double norm = norms[unit.index];
        const double factor = clip_coefficient_of(norm, largest, eps);
        const bool zero = zero_nonfinite && !(fabs(norm) <= LARGEST);
        const Change change = zero ? ZERO : factor == 1 ? KEEP : MULTIPLY;
        if (in_place && change == KEEP) continue;
        Scale op(factor, change);
        walk_tensor(list, unit.tensor, chunk, op);
    }
}
