// Updates the running statistics of a batch norm with those of one batch.
//
//   next_mean = (1 - momentum) * running_mean + momentum * mean
//   next_var  = (1 - momentum) * running_var  + momentum * var * n / (n - 1)
//
// n is `count`, the elements per channel. If it is at most 1, there
// is no unbiased variance, and the statistics do not change. A term with weight 0 is skipped, even
// if it is NaN or infinite.
//
// running_mean, running_var, next_mean, next_var: channels of STAT_T; next_mean may be running_mean,
// and next_var running_var. mean, var: channels of double. Written with =. Deterministic.
//
// Launch: a thread per channel, any grid, one-dimensional blocks.

#include "dtypes.cuh"

__device__ __forceinline__ double moved(double from, double to, double momentum) {
    if (momentum == 0) return from;
    if (momentum == 1) return to;
    return sum_of(product_of(1 - momentum, from), product_of(momentum, to));
}

extern "C" __global__ void update_running(
    const STAT_T* running_mean, const STAT_T* running_var, const double* mean, const double* var,
    double count, double momentum, STAT_T* next_mean, STAT_T* next_var, i64 channels
) {
    const double weight = count <= 1 ? 0 : momentum, unbiased = count / (count - 1);
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 k = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; k < channels; k += step) {
        const double from_mean = to_double(running_mean[k]), from_var = to_double(running_var[k]);
        next_mean[k] = narrow<STAT_T>(moved(from_mean, mean[k], weight));
        next_var[k] = narrow<STAT_T>(moved(from_var, product_of(var[k], unbiased), weight));
    }
}
