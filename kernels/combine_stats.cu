// The mean and the variance over all ranks, channel by channel.
//
//   combine_stats: total = sum of n_r, mean = sum of n_r / total * mean_r,
//                  var = sum of n_r / total * (var_r + (mean_r - mean)^2)
//
// means, variances: (ranks, channels); counts: (ranks); mean, var: (channels); total: one number;
// all double. A rank whose count is 0 is ignored; if all counts are 0, the results are 0. The mean
// is summed about the first rank's mean, so that equal means give exactly that mean, and in halves,
// so that no difference overflows. Weights are at most 1, so that no intermediate overflows unless
// the result does. All outputs are written with =. Deterministic: ranks are added in order.
//
// Launch: a thread per channel, any grid, one-dimensional blocks.

#include "dtypes.cuh"

// By an instruction that no difference is fused with.
__device__ __forceinline__ double half_of(double x) { return product_of(0.5, x); }

extern "C" __global__ void combine_stats(
    const double* means, const double* variances, const double* counts, u32 ranks, i64 channels,
    double* mean, double* var, double* total
) {
    double count = 0;
    u32 first = ranks;
    for (u32 r = 0; r < ranks; ++r) {
        count += counts[r];
        if (first == ranks && counts[r] != 0) first = r;
    }
    const i64 start = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (start == 0) *total = count;
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.x;
    for (i64 k = start; k < channels; k += step) {
        const double centre = first < ranks ? means[first * channels + k] : 0;
        double half = 0, spread = 0;
        for (u32 r = first; r < ranks; ++r)
            if (counts[r] != 0)
                half = fused(counts[r] / count, half_of(means[r * channels + k]) - half_of(centre), half);
        const double middle = (centre + half) + half;
        for (u32 r = first; r < ranks; ++r) {
            if (counts[r] == 0) continue;
            const double weight = counts[r] / count, apart = means[r * channels + k] - middle;
            spread = fused(weight, variances[r * channels + k], spread);
            spread = fused(product_of(weight, apart), apart, spread);
        }
        mean[k] = middle;
        var[k] = spread;
    }
}
