// The input of a layer norm from its output: x = (y - bias) / scale / inv_std + mean.
//
// y, x: (rows, width) of DATA_T, C order; x may be y. scale, bias: width of PARAM_T or null. mean,
// inv_std: rows of STAT_T. x is written with =. Deterministic: elements are independent.
//
// Launch: blockDim = (threads per row, rows per block), gridDim = (blocks over the rows, blocks
// over the columns); any sizes. If VEC > 1, width is a multiple of VEC and arrays are aligned
// for packs.

#include "packs.cuh"

typedef Wide<DATA_T>::type A;

__device__ __forceinline__ void invert_pack(
    const DATA_T* y, const PARAM_T* scale, const PARAM_T* bias, i64 column, A mean, A inv_std,
    DATA_T* x
) {
    A values[VEC], factor[VEC], offset[VEC];
    load<VEC>(y, values);
    load_or<VEC>(scale, column, A{1}, factor);
    load_or<VEC>(bias, column, A{0}, offset);
#pragma unroll
    for (int k = 0; k < VEC; ++k)
        values[k] = (values[k] - offset[k]) / factor[k] / inv_std + mean;
    store<VEC>(x, values);
}

extern "C" __global__ void __launch_bounds__(1024, 1) layer_norm_inverse(
    const DATA_T* y, const PARAM_T* scale, const PARAM_T* bias, const STAT_T* mean,
    const STAT_T* inv_std, DATA_T* x, i64 rows, i64 width
) {
    const i64 down = static_cast<i64>(gridDim.x) * blockDim.y;
    const i64 along = static_cast<i64>(gridDim.y) * blockDim.x * VEC;
    const i64 start = (static_cast<i64>(blockIdx.y) * blockDim.x + threadIdx.x) * VEC;
    i64 row = static_cast<i64>(blockIdx.x) * blockDim.y + threadIdx.y;
    for (; row < rows; row += down) {
        const A centre = widen(mean[row]), factor = widen(inv_std[row]);
        for (i64 column = start; column < width; column += along) {
            const i64 at = row * width + column;
            invert_pack(y + at, scale, bias, column, centre, factor, x + at);
        }
    }
}
