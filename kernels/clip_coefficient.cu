// The factors that clip gradients of given norms: `count` float64 numbers. Outputs are written with =.
//
// Contiguous arrays; the output may be the input. Deterministic.
//
// Launch: a thread per element, any grid, one-dimensional blocks.

#include "dtypes.cuh"
#include "clip_coefficient.cuh"

// With *max_norm, or `limit` if `max_norm` is null.
extern "C" __global__ void clip_coefficient(const double* norm, i64 count, const double* max_norm, double limit, double eps, double* out) {
    const double largest = max_norm ? *max_norm : limit;
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step)
        out[i] = clip_coefficient_of(norm[i], largest, eps);
}
