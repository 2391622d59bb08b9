// Batch norm forward: y = (x - mean) * inv_std * scale + bias, with statistics per channel.
//
//   channel_moments: each share's number of elements, mean, and squares of distances from it
//   normalize:       y
//
// finish_moments of batch_statistics.cu has its turn between them.
//
// x, y: (before, channels, after) of DATA_T, C order; y may be x. scale, bias: channels of
// PARAM_T or null. parts: (shares, channels) of Moments, shares = gridDim.y of channel_moments. exact:
// (3, channels) of double: the mean in two numbers, and inv_std, before rounding. All outputs are written
// with =. Deterministic: fixed orders, no atomics. f32 and narrower are summed in floats over a few packs,
// then in double, of which many GPUs have little. If a square overflows or loses digits, the thread sums
// again in double. The mean of finite f64 elements is finite.
//
// Launch: as in channels.cuh, blockDim.x * blockDim.y at most 256, blockDim.y a power of two; any grid.
// If VEC > 1, arrays are aligned for packs and after (channels if LAST) is a multiple of VEC.

#include "channel_forward.cuh"
#include "channel_moments.cuh"

// Blocks on a multiprocessor, which registers allow.
#define RESIDENT (OWN == 1 && sizeof(A) == 4 ? 4 : 2)

extern "C" __global__ void __launch_bounds__(256, RESIDENT) channel_moments(
    const DATA_T* x, Moments* parts, i64 before, i64 channels, i64 after
) {
    __shared__ Moments tile[TILE];
    write_moments(x, parts, Shape{before, channels, after}, tile);
}

extern "C" __global__ void __launch_bounds__(256, 2) normalize(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, const double* exact, DATA_T* y,
    i64 before, i64 channels, i64 after
) {
    normalize_columns(x, scale, bias, exact, y, Shape{before, channels, after});
}
