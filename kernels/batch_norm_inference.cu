// Batch norm with running statistics: y = (x - mean) * inv_std * scale + bias, inv_std = 1 /
// sqrt(var + eps).
//
// x, y: (before, channels, after) of DATA_T, C order; y may be x. scale, bias: channels of PARAM_T
// or null. mean, var: channels of STAT_T. y is written with =. Deterministic: there are no sums.
//
// Launch: as in channels.cuh, blockDim.x * blockDim.y at most 256; any grid. If VEC > 1, arrays are
// aligned for packs and after (channels if LAST) is a multiple of VEC.

#include "known_stats.cuh"

extern "C" __global__ void __launch_bounds__(256, 2) infer(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, const STAT_T* mean,
    const STAT_T* var, DATA_T* y, i64 before, i64 channels, i64 after, double eps
) {
    const Shape shape = {before, channels, after};
    for (i64 channel = first_channel(after); channel < channels; channel += channel_step()) {
        Known of;
        A factor[OWN], offset[OWN];
        load_known(mean, var, eps, channel, shape, of);
        load_own(scale, channel, shape, A{1}, factor);
        load_own(bias, channel, shape, A{0}, offset);
        const Place at = place_of(shape, channel);
        for (Walk walk(shape); walk.inside(shape);) {
            const Places places(walk, shape, at.channel);
            const Packs packs = fetch_packs(x + at.start, places);
#pragma unroll
            for (int b = 0; b < AT_ONCE; ++b) {
                if (b >= places.count) continue;
                A out[VEC];
#pragma unroll
                for (int k = 0; k < VEC; ++k)
                    out[k] = fused(xhat_of(packs.at[b], k, of), factor[k % OWN], offset[k % OWN]);
                store<VEC>(y + at.start + places.at[b], out);
            }
        }
    }
}
