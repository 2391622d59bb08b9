// Arithmetic on norms, element by element over `count` float64 numbers. Outputs are written with =.
//
// Contiguous arrays; an output may be an input. Deterministic.
//
// Launch: a thread per element, any grid, one-dimensional blocks.

#include "dtypes.cuh"
#include "clip_coefficient.cuh"

#define FOR_EACH(i, count)                                                              \
    for (i64 i = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; i < (count);  \
         i += static_cast<i64>(gridDim.x) * blockDim.x)

// With *max_norm, or `limit` if `max_norm` is null.
extern "C" __global__ void clip_coefficient(const double* norm, i64 count, const double* max_norm, double limit, double eps, double* out) {
    const double largest = max_norm ? *max_norm : limit;
    FOR_EACH(i, count) out[i] = clip_coefficient_of(norm[i], largest, eps);
}

// (norm / largest)^p, with 0/0 and inf/inf counted as 1. For an infinite p: 0, or NaN, which a
// maximum over ranks may have dropped.
extern "C" __global__ void norm_shares(const double* norm, const double* largest, i64 count, double p, u32 infinite, double* out) {
    FOR_EACH(i, count) {
        const double share = norm[i] == largest[i] ? 1 : norm[i] / largest[i];
        out[i] = infinite ? share * 0 : pow(share, p);
    }
}

// largest * total^(1/p). For an infinite p: largest + total, which is largest or NaN.
extern "C" __global__ void norm_of_shares(const double* total, const double* largest, i64 count, double p, u32 infinite, double* out) {
    FOR_EACH(i, count) out[i] = infinite ? largest[i] + total[i] : largest[i] * pow(total[i], 1 / p);
}
