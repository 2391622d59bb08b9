// The gradients of layer_norm_grad.cu for wide rows, on devices with clusters: a cluster of blocks
// reads a row once, each block a part of its columns.
//
// Arrays as in layer_norm_grad.cu. partials: (PLANES, samples, gridDim.x / CLUSTER, width) of the
// accumulation dtype, or null: blocks of a cluster write sums of different columns. All outputs are
// written with =. Deterministic: fixed orders, no atomics.
//
// Launch: blockDim = (x, 1), x a multiple of 32 and at most 512 with CLUSTER * x * CHUNKS * VEC >=
// width; gridDim.x a multiple of CLUSTER; gridDim.z as in layer_norm_grad.cu. If VEC > 1, width is a
// multiple of VEC and arrays are aligned for packs (with a `layout`, only scale, bias and partials).
//
// A thread keeps its columns of scale and of 1 / scale (INVERSES), and their sums over all its rows, in registers.

#include "cluster.cuh"
#include "registers.cuh"
#include "row_gradient.cuh"

// A chunk's columns lie side by side in the cluster, so that blocks have equal shares.
__device__ __forceinline__ int column_of(int chunk) {
    const int block = chunk * CLUSTER + cluster_rank();
    return (block * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * VEC;
}

// 1 / scale is in registers too, if none are needed for addresses. xhat is kept if it took a division, or a bias.
constexpr bool INVERSES = FROM_OUTPUT && !STRIDED;
constexpr bool KEEP_XHAT = FROM_OUTPUT && (STRIDED || CENTRED);

// A thread's part of a row, as memory has it.
struct Row {
    Part part[CHUNKS];
    Raw<DATA_T, VEC> ds[CHUNKS];  // if DS_EARLY
    RawStatistics of;
#if FROM_OUTPUT
    Numbers xhat[KEEP_XHAT ? CHUNKS : 1][VEC];  // kept by `sum_row`
#endif
};

// Registers of a thread for all its rows: its columns of scale, its inverse, and their sums.
struct Columns {
    Raw<PARAM_T, VEC> scale[CHUNKS];
    A inverse[CHUNKS][VEC];  // if INVERSES
    A sums[PLANES][CHUNKS][VEC];
};

// True if there are registers for a row in flight while another is worked on, beside what the sums of a cluster
// take. Other rows wait for instructions, and not for memory.
constexpr int ROW = 2 * CHUNKS * words<Raw<DATA_T, VEC>>();
constexpr int KEPT = CHUNKS * (words<Raw<PARAM_T, VEC>>() + (PLANES + INVERSES) * VEC * words<A>());
constexpr bool AHEAD = !STRIDED && VEC * sizeof(DATA_T) == 16 &&
    needed(CHUNKS) + 16 + KEPT + 2 * ROW + CHUNKS <= registers(CLUSTER_THREADS, 1);

// A parameter's values for a chunk. Beyond the last column, and if it is null, `absent`.
__device__ __forceinline__ Raw<PARAM_T, VEC> fetch_columns(const PARAM_T* from, int c, int width, A absent) {
    return fetch_if<VEC>(from && column_of(c) < width, from + column_of(c), narrow<PARAM_T>(absent));
}

// Issues all loads of a row. Beyond the last row and column everything is 0.
__device__ __forceinline__ Row fetch_row(const Arrays& in, bool exists, i64 row, int width) {
    const Place place = place_of(in.layout, row);
    const DATA_T* dy = in.dy + start_of(in.layout, DY, place, width);
    const DATA_T* source = in.source + start_of(in.layout, SOURCE, place, width);
    Row to;
    to.of = fetch_statistics(in, exists, row);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const bool inside = exists && column_of(c) < width;
        to.part[c].dy = fetch_data(inside, dy + column_of(c));
        to.part[c].source = fetch_data(inside, source + column_of(c));
    }
    return to;
}

// Issues the loads of ds of a row, which exists: if there are registers at its own turn, as it is needed last.
constexpr bool DS_EARLY = ADDED && !STRIDED && sizeof(A) == 4 && !(TWO_AT_ONCE && CENTRED && sizeof(DATA_T) == 4);
__device__ __forceinline__ void fetch_ds(const Arrays& in, i64 row, int width, Row& to) {
    const DATA_T* ds = in.ds + start_of(in.layout, DS, place_of(in.layout, row), width);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) to.ds[c] = fetch_data(column_of(c) < width, ds + column_of(c));
}

// Adds to the column sums; returns the thread's row sums.
__device__ __forceinline__ Pair<A> sum_row(
    const Arrays& in, const Statistics& of, int width, Columns& own, Row& at
) {
    Pair<A> sums = {0, 0};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        Parameters parameters = {own.scale[c], {}};
        if (HAS_BIAS) parameters.bias = fetch_columns(in.bias, c, width, A{0});
        // Beyond the last column xhat is 0. With the row's statistics it could overflow, and
        // 0 * xhat would be NaN.
        const Statistics here = column_of(c) < width ? of : Statistics{0, 0};
#pragma unroll
        for (int k = 0; k < VEC; k += ABREAST) {
            const Numbers inverse = numbers_at(own.inverse[c], k);
            const Elements e = elements_at<INVERSES>(in.layout, at.part[c], parameters, here, k, inverse);
            add_to_columns(e, [&](int plane, int i) -> A& { return own.sums[plane][c][k + i]; });
            add_to_row(e, sums);
#if FROM_OUTPUT
            if (KEEP_XHAT) at.xhat[c][k] = e.xhat;
#endif
        }
    }
    return sums;
}

__device__ __forceinline__ void write_row(
    const Arrays& in, DATA_T* dx, i64 row, int width, const Row& at, const Columns& own, const Statistics& of,
    const Pair<A>& means
) {
    const Place place = place_of(in.layout, row);
    dx += start_of(in.layout, DX, place, width);
    const DATA_T* ds = ADDED ? in.ds + start_of(in.layout, DS, place, width) : nullptr;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        if (column_of(c) >= width) continue;
        Parameters parameters = {own.scale[c], {}};
        if (HAS_BIAS && !KEEP_XHAT) parameters.bias = fetch_columns(in.bias, c, width, A{0});
        const Raw<DATA_T, VEC> further = DS_EARLY ? at.ds[c] : fetch_data(ADDED, ds + column_of(c));
        A out[VEC];
#pragma unroll
        for (int k = 0; k < VEC; k += ABREAST) {
            const Numbers inverse = numbers_at(own.inverse[c], k);
            Elements e = elements_at<INVERSES>(in.layout, at.part[c], parameters, of, k, inverse);
#if FROM_OUTPUT
            if (KEEP_XHAT) e.xhat = at.xhat[c][k];
#endif
            put_numbers(out, k, gradient(e, means, of.inv_std, numbers_at(further, k)));
        }
        store_data(dx + column_of(c), out);
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER) __launch_bounds__(CLUSTER_THREADS, 1) layer_norm_grad_cluster(
    const DATA_T* dy, const DATA_T* source, const PARAM_T* scale, const PARAM_T* bias,
    const STAT_T* mean, const STAT_T* inv_std, DATA_T* dx, A* partials, i64 rows, int width
    FURTHER_PARAMETERS
) {
    FURTHER_VARIABLES
    __shared__ ClusterSlots<Pair<A>> slots;
    scale = of_sample(scale, width);
    const Arrays in = {dy, source, scale, bias, mean, inv_std, ds, layout};
    const int step = gridDim.x / CLUSTER, cluster = blockIdx.x / CLUSTER;  // clusters
    const i64 end = (sample() + 1) * rows;
    i64 row = sample() * rows + cluster;
    Columns own = {};
    A share = {1};
    share /= width;  // once: a division takes as long as a row's sums
    Row next;
    if (AHEAD) next = fetch_row(in, row < end, row, width);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) own.scale[c] = fetch_columns(scale, c, width, A{1});
    if (INVERSES)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) invert(in.layout, own.scale[c], own.inverse[c]);
    cluster_barrier();
    for (int turn = 0; row < end; row += step, ++turn) {
        Row at = AHEAD ? next : fetch_row(in, true, row, width);
        if (AHEAD) next = fetch_row(in, row + step < end, row + step, width);
        if (DS_EARLY) fetch_ds(in, row, width, at);
        const Statistics of = widen(at.of);
        const Pair<A> sums = sum_row(in, of, width, own, at);
        if (LEFT_EARLY && !dx) continue;
        Pair<A> means = cluster_sums(sums, slots, turn);
        means.first = means.first * share;
        means.second = means.second * share;
        if (ADDED || LEFT_EARLY || dx) write_row(in, dx, row, width, at, own, of, means);
    }
    if (!partials) return;
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            const i64 before = partials_before(plane, step) + cluster;
            if (column_of(c) < width) store<VEC>(partials + before * width + column_of(c), own.sums[plane][c]);
        }
}
