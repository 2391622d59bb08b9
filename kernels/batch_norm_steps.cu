// Batch norm in steps, between which sums may be exchanged with other ranks.
//
//   take_stats:  exact = mean, 0, 1 / sqrt(var + eps); saved_mean, inv_std = the same, rounded
//   finish_sums: sum_dy_xhat, sum_dy = totals
//   take_sums:   means = sums / n
//
// finish_moments of batch_statistics.cu computes mean and var, and sum_channels of batch_norm_grad.cu the
// partials of finish_sums; normalize reads `exact`, and apply_channels reads `means`.
//
// -DACC_T is the accumulation dtype, -DSTAT_T the dtype of saved_mean and inv_std. partials: (2,
// shares, channels) of double. mean, var, sum_dy_xhat, sum_dy: channels of double. exact: (3,
// channels) of double. means: (2, channels) of ACC_T. All outputs are written with =.
// Deterministic: fixed orders, no atomics.
//
// Launch: finish_sums: blockDim = (x, y), y a power of two and x * y at most 1024; any gridDim.x.
// take_stats and take_sums: a thread per channel, any grid, one-dimensional blocks.

#include "columns.cuh"

typedef Wide<ACC_T>::type A;

extern "C" __global__ void take_stats(
    const double* mean, const double* var, double* exact, STAT_T* saved_mean, STAT_T* inv_std,
    i64 channels, double eps
) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 k = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; k < channels; k += step) {
        const double factor = 1 / sqrt(var[k] + eps);
        exact[k] = mean[k];
        exact[channels + k] = 0;
        exact[2 * channels + k] = factor;
        saved_mean[k] = narrow<STAT_T>(mean[k]);
        inv_std[k] = narrow<STAT_T>(factor);
    }
}

extern "C" __global__ void __launch_bounds__(1024, 1) finish_sums(
    const double* partials, double* sum_dy_xhat, double* sum_dy, i64 shares, i64 channels
) {
    __shared__ double tile[1024];
    write_totals(partials, sum_dy_xhat, sum_dy, shares, channels, tile);
}

extern "C" __global__ void take_sums(
    const double* sum_dy_xhat, const double* sum_dy, double count, A* means, i64 channels
) {
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 k = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; k < channels; k += step) {
        means[k] = narrow<A>(sum_dy_xhat[k] / count);
        means[channels + k] = narrow<A>(sum_dy[k] / count);
    }
}
