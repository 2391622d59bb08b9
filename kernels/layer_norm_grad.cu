// Gradients of layer norm, RMS norm and invertible layer norm; each row is read once.
//
//   xhat = (x - mean) * inv_std     (RMS: x * inv_std; invertible: (y - bias) / scale)
//   dx      = inv_std * (w - mean(w) - xhat * mean(w * xhat)),  w = dy * scale
//   partials[0][block][column] = sum over the block's rows of dy * xhat
//   partials[1][block][column] = the same sum of dy (not for RMS)
//
// dy, source, dx: (rows, width) of DATA_T, C order; dx may be dy. scale, bias: width of PARAM_T
// or null. mean, inv_std: rows of STAT_T. partials: (PLANES, gridDim.x, width) of the
// accumulation dtype, or null if no parameter gradient is wanted. All outputs are written with =.
// Deterministic: fixed orders, no atomics.
//
// Launch: blockDim = (threads per row, rows per block), x a power of two with
// x * CHUNKS * VEC >= width, x * y a multiple of 32 and at most 512 (256 if y > 1); any
// gridDim.x. If VEC > 1, width is a multiple of VEC and arrays are 16-byte aligned. LONG: x is
// 512, y is 1, and dynamic shared memory holds PLANES * CHUNKS * VEC * x numbers of type A.
//
// For all its rows, a thread keeps its columns of scale and its column sums in registers. LONG
// rows have too many columns for that: their sums are in shared memory, and scale is read again
// from the cache.

#include "row_gradient.cuh"

#define MERGED_THREADS 256
#define LONG_THREADS 512

// If a thread holds few columns, there are registers for two resident blocks.
constexpr int BLOCKS = CHUNKS * VEC * sizeof(A) <= (VEC > 1 ? 32 : 16) ? 2 : 1;

// Threads per row.
__device__ __forceinline__ int threads() { return LONG ? LONG_THREADS : static_cast<int>(blockDim.x); }

struct Row { A w[CHUNKS][VEC], xhat[CHUNKS][VEC]; };  // load_row puts dy and the source here

__device__ __forceinline__ int column_of(int chunk) {
    return (chunk * threads() + static_cast<int>(threadIdx.x)) * VEC;
}

// Columns beyond the last have a scale of 1.
__device__ __forceinline__ void load_scale(const PARAM_T* scale, int c, int width, A (&to)[VEC]) {
    if (column_of(c) < width) load_or<VEC>(scale, column_of(c), A{1}, to);
    else fill<VEC>(to, A{1});
}

#if LONG
struct Columns {
    const PARAM_T* scale;
    A* sums;
    // Neighbouring threads use neighbouring words, so there are no bank conflicts.
    __device__ __forceinline__ A& sum(int plane, int c, int k) {
        return sums[((plane * CHUNKS + c) * VEC + k) * LONG_THREADS + threadIdx.x];
    }
    __device__ __forceinline__ void scale_of(int c, int width, A (&to)[VEC]) const {
        load_scale(scale, c, width, to);
    }
    __device__ __forceinline__ Columns(const PARAM_T* from, int, A* shared) : scale(from), sums(shared) {}
};
#else
struct Columns {
    A scale[CHUNKS][VEC], sums[PLANES][CHUNKS][VEC];
    __device__ __forceinline__ A& sum(int plane, int c, int k) { return sums[plane][c][k]; }
    __device__ __forceinline__ void scale_of(int c, int, A (&to)[VEC]) const {
#pragma unroll
        for (int k = 0; k < VEC; ++k) to[k] = scale[c][k];
    }
    __device__ __forceinline__ Columns(const PARAM_T* from, int width, A*) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) load_scale(from, c, width, scale[c]);
    }
};
#endif

__device__ __forceinline__ void clear(Columns& own) {
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int k = 0; k < VEC; ++k) own.sum(plane, c, k) = A{0};
}

// The bias is read again for each row, from the cache: no registers are left for it.
__device__ __forceinline__ void subtract(const PARAM_T* from, A (&values)[VEC]) {
    A bias[VEC];
    load<VEC>(from, bias);
#pragma unroll
    for (int k = 0; k < VEC; ++k) values[k] -= bias[k];
}

// Loads the thread's part of a row, with the bias subtracted. Beyond the last row and column it
// sets dy to 0 and the source to the mean, which add nothing to any sum; with another source,
// xhat could overflow and 0 * xhat would be NaN.
__device__ __forceinline__ void load_row(
    const Arrays& in, i64 row, i64 rows, int width, const Statistics& of, Row& at
) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (row >= rows || column_of(c) >= width) {
            fill<VEC>(at.w[c], A{0});
            fill<VEC>(at.xhat[c], of.mean);
            continue;
        }
        load<VEC>(in.dy + row * width + column_of(c), at.w[c]);
        load<VEC>(in.source + row * width + column_of(c), at.xhat[c]);
        if (FROM_OUTPUT && in.bias) subtract(in.bias + column_of(c), at.xhat[c]);
    }
}

// Replaces dy by w and the source by xhat, adds to the column sums, returns the thread's row sums.
__device__ __forceinline__ Pair<A> sum_row(const Statistics& of, int width, Columns& own, Row& at) {
    Pair<A> sums = {0, 0};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        A scale[VEC];
        own.scale_of(c, width, scale);
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const A dy = at.w[c][k];
            const A xhat = normalized(at.xhat[c][k], scale[k], A{0}, of);
            const A w = dy * scale[k];
            own.sum(0, c, k) = fused(dy, xhat, own.sum(0, c, k));
            if (CENTRED) own.sum(PLANES - 1, c, k) += dy;
            at.w[c][k] = w;
            at.xhat[c][k] = xhat;
            sums.first += w;
            sums.second = fused(w, xhat, sums.second);
        }
    }
    return sums;
}

__device__ __forceinline__ void write_row(
    DATA_T* dx, i64 row, int width, const Row& at, const Pair<A>& means, A inv_std
) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column_of(c) >= width) continue;
        A out[VEC];
#pragma unroll
        for (int k = 0; k < VEC; ++k) out[k] = gradient(at.w[c][k], at.xhat[c][k], means, inv_std);
        store<VEC>(dx + row * width + column_of(c), out);
    }
}

// Adds one pack of column sums over the rows of the block. All threads of the block must call
// it; those with threadIdx.y == 0 get the result.
__device__ __forceinline__ void merge_rows(A (&sums)[VEC], A* tile) {
    __syncthreads();  // `tile` may still be read by the call before
#pragma unroll
    for (int k = 0; k < VEC; ++k)
        tile[(threadIdx.y * blockDim.x + threadIdx.x) * VEC + k] = sums[k];
    __syncthreads();
    if (threadIdx.y != 0) return;
    for (int y = 1; y < blockDim.y; ++y)
#pragma unroll
        for (int k = 0; k < VEC; ++k) sums[k] += tile[(y * blockDim.x + threadIdx.x) * VEC + k];
}

__device__ __forceinline__ void write_partials(A* partials, int width, Columns& own, A* tile) {
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            A sums[VEC];
#pragma unroll
            for (int k = 0; k < VEC; ++k) sums[k] = own.sum(plane, c, k);
            if (!LONG && blockDim.y > 1) merge_rows(sums, tile);
            if (threadIdx.y != 0 || column_of(c) >= width) continue;
            const i64 row = static_cast<i64>(plane) * gridDim.x + blockIdx.x;
            store<VEC>(partials + row * width + column_of(c), sums);
        }
}

extern "C" __global__ void __launch_bounds__(512, BLOCKS) layer_norm_grad(
    const DATA_T* dy, const DATA_T* source, const PARAM_T* scale, const PARAM_T* bias,
    const STAT_T* mean, const STAT_T* inv_std, DATA_T* dx, A* partials, i64 rows, int width
) {
    __shared__ Pair<A> slots[2 * WARP];
#if LONG
    DYNAMIC_SHARED(A, tile);
#else
    __shared__ A tile[MERGED_THREADS * VEC];
#endif
    const Arrays in = {dy, source, scale, bias, mean, inv_std};
    Columns own(scale, width, tile);
    clear(own);
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    int turn = 0;
    for (i64 first = static_cast<i64>(blockIdx.x) * blockDim.y; first < rows; first += step) {
        const i64 row = first + threadIdx.y;
        Statistics of = {0, 0};
        if (row < rows) of = statistics_of(in, row);
        Row at;
        load_row(in, row, rows, width, of, at);
        Pair<A> means = row_sums(sum_row(of, width, own, at), slots, turn++);
        means.first /= width;
        means.second /= width;
        if (row < rows) write_row(dx, row, width, at, means, of.inv_std);
    }
    if (partials) write_partials(partials, width, own, tile);
}
