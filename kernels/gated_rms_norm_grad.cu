// Gradients of RMS norm with an activated gate (gated_rms_norm.cu). With a = act(gate):
//
//   before = 1: xhat = x * inv_std,      u = dy * a
//   before = 0: xhat = x * a * inv_std,  u = dy
//   w = u * scale,  dsource = inv_std * (w - xhat * mean(w * xhat))
//   before = 1: dx = dsource,      dgate = dy * xhat * scale * act'(gate)
//   before = 0: dx = dsource * a,  dgate = dsource * x * act'(gate)
//   partials[block][column] = sum over the block's rows of u * xhat
//
// dy, x, gate, dx, dgate: (rows, width) of DATA_T, strided by `layout`, in this order; dx may be dy
// or x, dgate may be dy or gate. scale: width of PARAM_T or null. inv_std: rows of STAT_T. partials:
// (gridDim.x, width) of the accumulation dtype, or null if dscale is not wanted. All outputs are
// written with =. Deterministic: fixed orders, no atomics.
//
// Launch: as gated_rms_norm.cu. If CHUNKS > 0, x * CHUNKS * VEC >= width, and a thread keeps the
// sums of its columns in registers; with CHUNKS = 0 a row may have any length, y is 1, and sums are
// kept in partials. Each thread reads its part of a row twice: for the mean, and for the outputs.

#include "gated.cuh"

#define MERGED_THREADS 512

// The numbers of arrays in the layout.
enum { DY, X, GATE, DX, DGATE };

struct Row {
    const DATA_T *dy, *x, *gate;
    A inv_std;
    i64 width;  // 0 for a row beyond the last
};

// One pack of a row, widened, and what the formulas make of an element.
struct Part { A dy[VEC], x[VEC], gate[VEC], scale[VEC]; };
struct Element { A xhat, u, w, factor, slope; };

__device__ __forceinline__ Part load_part(
    const Layout& layout, const Row& row, const PARAM_T* scale, i64 column
) {
    const Raw<DATA_T, VEC> dy = fetch_data(true, row.dy + column);
    const Raw<DATA_T, VEC> x = fetch_data(true, row.x + column);
    const Raw<DATA_T, VEC> gate = fetch_data(true, row.gate + column);
    Part at;
    load_scale(layout, scale, column, at.scale);
    widen(dy, at.dy);
    widen(x, at.x);
    widen(gate, at.gate);
    return at;
}

__device__ __forceinline__ Element element_of(const Part& at, int i, A inv_std, const Gating& how) {
    const Activated gate = activated(at.gate[i], how.silu);
    const A xhat = choose(how.before, at.x[i], at.x[i] * gate.value) * inv_std;
    const A u = choose(how.before, at.dy[i] * gate.value, at.dy[i]);
    return {xhat, u, u * at.scale[i], gate.value, gate.slope};
}

// The thread's share of the sum of w * xhat over a row.
__device__ __forceinline__ double share_of_products(
    const Layout& layout, const Row& row, const PARAM_T* scale, const Gating& how
) {
    double total = 0;
    for (i64 k = 0; column_of(k) < row.width; ++k) {
        const Part at = load_part(layout, row, scale, column_of(k));
        A sum = {0};
#pragma unroll
        for (int i = 0; i < VEC; ++i) {
            const Element e = element_of(at, i, row.inv_std, how);
            sum = fused(e.w, e.xhat, sum);
        }
        total += exactly(sum);
    }
    return total;
}

// Writes a pack of dx and dgate; adds to the sums of its columns.
__device__ __forceinline__ void write_part(
    const Part& at, A mean, A inv_std, const Gating& how, DATA_T* dx,
    DATA_T* dgate, A (&sums)[VEC]
) {
    A of_x[VEC], of_gate[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        const Element e = element_of(at, i, inv_std, how);
        const A dsource = inv_std * (e.w - e.xhat * mean);
        of_x[i] = choose(how.before, dsource, dsource * e.factor);
        of_gate[i] = choose(how.before, at.dy[i] * e.xhat * at.scale[i], dsource * at.x[i]) * e.slope;
        sums[i] = fused(e.u, e.xhat, sums[i]);
    }
    store_data(dx, of_x);
    store_data(dgate, of_gate);
}

// Adds one pack of sums over the rows of the block, of which the first thread of each column has
// the total. All threads of the block must call it.
__device__ __forceinline__ void merge_rows(A (&sums)[VEC], A* tile) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        __syncthreads();  // `tile` may still be read
        A* own = tile + threadIdx.y * blockDim.x + threadIdx.x;
        *own = sums[i];
        __syncthreads();
        for (int y = 1; threadIdx.y == 0 && y < blockDim.y; ++y) sums[i] += own[y * blockDim.x];
    }
}

extern "C" __global__ void __launch_bounds__(512, 1) gated_rms_norm_grad(
    const DATA_T* dy, const DATA_T* x, const DATA_T* gate, const PARAM_T* scale,
    const STAT_T* inv_std, DATA_T* dx, DATA_T* dgate, A* partials, i64 rows, i64 width, int silu,
    int before, const __grid_constant__ Layout layout
) {
    __shared__ double slots[2 * WARP];
    const Gating how = {silu, before};
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    const double share = 1.0 / width;
    A* own = partials ? partials + blockIdx.x * width : nullptr;
#if CHUNKS
    __shared__ A tile[MERGED_THREADS];
    A sums[CHUNKS][VEC];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) fill<VEC>(sums[c], A{0});
#endif
    i64 first = static_cast<i64>(blockIdx.x) * blockDim.y;
    for (int turn = 0; first < rows; first += step, ++turn) {
        const i64 number = first + threadIdx.y;
        const bool inside = number < rows;
        const Place place = place_of(layout, number);
        const Row row = {
            dy + start_of(layout, DY, place, width), x + start_of(layout, X, place, width),
            gate + start_of(layout, GATE, place, width), inside ? widen(inv_std[number]) : A{0},
            inside ? width : 0,
        };
        DATA_T* to = dx + start_of(layout, DX, place, width);
        DATA_T* to_gate = dgate + start_of(layout, DGATE, place, width);
        const double total = row_sums(share_of_products(layout, row, scale, how), slots, turn);
        const A mean = narrow<A>(__dmul_rn(total, share));
#if CHUNKS
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 column = column_of(c);
            if (column >= row.width) continue;
            const Part at = load_part(layout, row, scale, column);
            write_part(at, mean, row.inv_std, how, to + column, to_gate + column, sums[c]);
        }
#else
        for (i64 k = 0; column_of(k) < row.width; ++k) {
            const i64 column = column_of(k);
            A sums[VEC];
            fill<VEC>(sums, A{0});
            if (partials && turn) load<VEC>(own + column, sums);
            const Part at = load_part(layout, row, scale, column);
            write_part(at, mean, row.inv_std, how, to + column, to_gate + column, sums);
            if (partials) store<VEC>(own + column, sums);
        }
#endif
    }
#if CHUNKS
    if (!partials) return;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (blockDim.y > 1) merge_rows(sums[c], tile);
        if (threadIdx.y == 0 && column_of(c) < width) store<VEC>(own + column_of(c), sums[c]);
    }
#endif
}
