// target = source * coefficient over a list of pairs of tensors, each pair of one dtype.
//
// One list may mix f16, bf16, f32 and f64. Results are those of a product in double, rounded once.
// The coefficient is computed on the device. A coefficient of 1 keeps every bit; in place, the
// launch then returns before it accesses any gradient. Targets are written with =. Deterministic:
// elements are independent.
//
// Launch: a warp per chunk, any grid, blockDim.x a multiple of 32. The last chunk is processed
// first, because the data that the norm read last are still in L2.

#include "scaling.cuh"
#include "clip_coefficient.cuh"

// The factor for gradients whose norm times |scale| is `norm`. Where that is infinite, finite
// gradients become 0, though `scale` is what made it so.
__device__ __forceinline__ double factor_of(double norm, double max_norm, double eps, double scale) {
    const double coefficient = clip_coefficient_of(norm, max_norm, eps);
    return coefficient == 0 ? coefficient : coefficient * scale;
}

// Scales by factor_of(*norm), with *max_norm or `limit`, *scale or `number`. `zero_nonfinite`: if
// the norm or the scale is NaN or infinite, every element becomes +0.
extern "C" __global__ void __launch_bounds__(256, 3)
clip_by_norm(const __grid_constant__ TensorList list, const double* norm, const double* max_norm,
             double limit, double eps, const double* scale, double number, u32 zero_nonfinite, u32 in_place) {
    const double found = number_of(norm, 0), by = number_of(scale, number);
    const bool zero = zero_nonfinite && !(fabs(found) <= LARGEST && fabs(by) <= LARGEST);
    scale_all(list, factor_of(found, number_of(max_norm, limit), eps, by), zero, in_place);
}
