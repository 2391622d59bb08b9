// A batch norm's statistics: of a batch, and running ones, which it moves.
//
//   finish_moments: mean, var of a batch from the moments of its shares; exact = mean in two numbers,
//                   1 / sqrt(var + eps); saved_mean, inv_std = the same, rounded; and what
//                   update_running writes
//   update_running: next_mean = (1 - momentum) * running_mean + momentum * mean
//                   next_var  = (1 - momentum) * running_var  + momentum * var * n / (n - 1)
//
// n is `count`, the elements per channel. If it is at most 1, there is no unbiased variance, and running
// statistics do not change. A term with weight 0 is skipped, even if it is NaN or infinite.
//
// Macros: STAT_T, the dtype of saved_mean and inv_std; RUN_T, that of running statistics. parts:
// (shares, channels) of Moments. mean, var: channels of double. exact: (3, channels) of double. next_mean
// may be running_mean, and next_var running_var. finish_moments writes the statistics of a batch if `mean` is
// not null, what a norm needs if `exact` is not, and running ones if they are not. Written with =.
// Deterministic: fixed orders, no atomics.
//
// Launch: finish_moments: blockDim = (x, y), y a power of two and x * y at most 1024; any gridDim.x.
// update_running: a thread per channel, any grid, one-dimensional blocks.

#include "columns.cuh"
#include "moments.cuh"

__device__ __forceinline__ double moved(double from, double to, double momentum) {
    if (momentum == 0) return from;
    if (momentum == 1) return to;
    return sum_of(product_of(1 - momentum, from), product_of(momentum, to));
}

// Moves running statistics of channel `k` towards those of a batch.
__device__ __forceinline__ void move_channel(
    const RUN_T* running_mean, const RUN_T* running_var, double mean, double var, double count,
    double momentum, RUN_T* next_mean, RUN_T* next_var, i64 k
) {
    const double weight = count <= 1 ? 0 : momentum, unbiased = count / (count - 1);
    const double from_mean = to_double(running_mean[k]), from_var = to_double(running_var[k]);
    next_mean[k] = narrow<RUN_T>(moved(from_mean, mean, weight));
    next_var[k] = narrow<RUN_T>(moved(from_var, product_of(var, unbiased), weight));
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_moments(
    const Moments* parts, double* mean, double* var, double* exact, STAT_T* saved_mean, STAT_T* inv_std,
    const RUN_T* running_mean, const RUN_T* running_var, RUN_T* next_mean, RUN_T* next_var,
    i64 shares, i64 channels, double eps, double momentum
) {
    __shared__ Moments tile[1024];
    each_column(channels, [&](i64 k) {
        const Moments all = column_total(parts, shares, channels, k, tile);
        if (threadIdx.y != 0 || k >= channels) return;
        const double average = all.mean + all.low, variance = all.variance();
        if (mean) {
            mean[k] = average;
            var[k] = variance;
        }
        if (exact) write_statistics(all, k, channels, eps, exact, saved_mean, inv_std);
        if (!running_mean) return;
        move_channel(
            running_mean, running_var, average, variance, all.count, momentum, next_mean, next_var, k
        );
    });
}

extern "C" __global__ void update_running(
    const RUN_T* running_mean, const RUN_T* running_var, const double* mean, const double* var,
    double count, double momentum, RUN_T* next_mean, RUN_T* next_var, i64 channels
) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 k = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; k < channels; k += step)
        move_channel(running_mean, running_var, mean[k], var[k], count, momentum, next_mean, next_var, k);
}
