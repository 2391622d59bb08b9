// Layer norm and RMS norm forward.
//
//   layer_norm (CENTRED = 1): y = (x - mean) * inv_std * scale + bias
//   RMS norm   (CENTRED = 0): y = x * inv_std * scale
//   inv_std = 1 / sqrt(variance + eps); an RMS norm uses the mean square instead of the variance
//   ADDED = 1: s = x + residual, rounded, replaces x
//
// x, y: (rows, width) of DATA_T, C order, or strided by `layout` (row_starts.cuh); y may be x.
// residual, s: the same, or null; s may be x or residual. scale, bias: width of PARAM_T or null.
// mean (null in an RMS norm), inv_std: rows of STAT_T. All outputs are written with =.
// Deterministic: fixed orders, no atomics.
//
// f32 and narrower are summed in float over the elements that a thread loads at once, then in
// double, for which many GPUs have few units. If a square overflows or loses digits, the thread
// sums again in double. A second pass over the row corrects the mean by the sum of x - mean.
//
// Launch: blockDim = (threads per row, rows per block), x a power of two below 32 or a multiple of
// 32, x * y a multiple of 32 and at most 1024 (512 if STRIDED); any gridDim.x; gridDim.z samples
// (row_starts.cuh). width > 0. If VEC > 1, width is a multiple of VEC and arrays are aligned for packs
// (with a `layout`, only scale and bias). If CHUNKS > 0, x * CHUNKS * VEC >= width: a thread then loads
// its part of a row once, all loads in flight together, and keeps it in registers. With CHUNKS = 0 a
// row may have any length, and is read once for each of its sums and again for y.
//
// CLUSTERED = 1, with CHUNKS > 0: a row has a cluster of blocks (cluster.cuh). blockDim = (x, 1), x a
// multiple of 32 and at most 512 with CLUSTER * x * CHUNKS * VEC >= width; gridDim.x a multiple of
// CLUSTER.

#include "row_starts.cuh"
#include "rows.cuh"

#ifndef CLUSTERED
#define CLUSTERED 0
#endif

typedef Wide<DATA_T>::type A;

// Packs whose loads are in flight at once; and what counts columns.
#if CHUNKS
constexpr int GROUP = CHUNKS;
typedef int Index;
#else
constexpr int GROUP = AT_ONCE;
typedef i64 Index;
#endif

template <int N> struct Packs { Raw<DATA_T, VEC> at[N]; };
typedef Packs<GROUP> Group;
// Of a sum, where there are two arrays to be read and few registers.
constexpr int SUMMED = CHUNKS ? GROUP : 1;
// Of y; fewer where compilers keep the scale and the bias of all of them at once, and spill registers.
#ifdef __CUDA_ARCH__
constexpr bool FEW = __CUDA_ARCH__ < 800 || (__CUDA_ARCH__ < 900 && sizeof(PARAM_T) > sizeof(DATA_T));
#else
constexpr bool FEW = false;
#endif
constexpr int NORMALIZED = FEW && !CHUNKS ? 2 : GROUP;

// How many blocks share a row; the slots of one sum, and the sum over the threads of a row.
#if CLUSTERED
#include "cluster.cuh"
constexpr int ROW_BLOCKS = CLUSTER;
#define IN_CLUSTERS __cluster_dims__(CLUSTER)
template <typename T> using RowSlots = ClusterSlots<T>;
template <typename T> __device__ __forceinline__ T sums_of_row(T value, RowSlots<T>& slots, int turn) {
    return cluster_sums(value, slots, turn);
}
#else
constexpr int ROW_BLOCKS = 1;
#define IN_CLUSTERS
template <typename T> struct RowSlots { T totals[2 * WARP]; };
template <typename T> __device__ __forceinline__ T sums_of_row(T value, RowSlots<T>& slots, int turn) {
    return row_sums(value, slots.totals, turn);
}
#endif

// The numbers of arrays in a layout.
enum { X, Y, RESIDUAL, S };

// A thread's part of a row.
struct Row {
    const DATA_T* x;
    Index width;  // 0 for a row beyond the last
#if CHUNKS
    Group held;
#endif
};

// A thread's number in its row.
__device__ __forceinline__ int row_thread() {
    return static_cast<int>(blockIdx.x % ROW_BLOCKS * blockDim.x + threadIdx.x);
}

// The first column of a thread's k-th pack.
__device__ __forceinline__ Index column_of(Index k) {
    return (k * static_cast<int>(ROW_BLOCKS * blockDim.x) + row_thread()) * VEC;
}

// A thread's packs from the k-th on; zeros beyond the end of the row.
template <int N>
__device__ __forceinline__ Packs<N> fetch_packs(const DATA_T* x, Index width, Index k) {
    Packs<N> group;
#pragma unroll
    for (int i = 0; i < N; ++i)
        group.at[i] = fetch_data(column_of(k + i) < width, x + column_of(k + i));
    return group;
}

// Writes s = x + residual for the thread's packs from the k-th on; returns it.
__device__ __forceinline__ Packs<SUMMED> add_packs(
    const DATA_T* x, const DATA_T* residual, DATA_T* s, Index width, Index k
) {
    Packs<SUMMED> sums = fetch_packs<SUMMED>(x, width, k);
    const Packs<SUMMED> more = fetch_packs<SUMMED>(residual, width, k);
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
        A values[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j) values[j] = widen(sums.at[i].at(j)) + widen(more.at[i].at(j));
        sums.at[i] = narrow_all<DATA_T>(values);
        if (column_of(k + i) < width) store_data(s + column_of(k + i), sums.at[i]);
    }
    return sums;
}

__device__ __forceinline__ Row fetch_row(const DATA_T* x, Index width) {
    Row row = {x, width};
#if CHUNKS
    row.held = fetch_packs<GROUP>(x, width, 0);
#endif
    return row;
}

// The row of s, of which a thread reads again only what it has written itself.
__device__ __forceinline__ Row add_row(
    const DATA_T* x, const DATA_T* residual, DATA_T* s, Index width
) {
    Row row = {s, width};
#if CHUNKS
    row.held = add_packs(x, residual, s, width, 0);
#else
    for (Index k = 0; column_of(k) < width; k += SUMMED) add_packs(x, residual, s, width, k);
#endif
    return row;
}

// Calls visit(k, the thread's packs from the k-th on) until the row ends; N of them at once, if it
// does not hold the row.
template <int N = GROUP, typename F>
__device__ __forceinline__ void for_each_group(const Row& row, F visit) {
#if CHUNKS
    visit(0, row.held);
#else
    for (Index k = 0; column_of(k) < row.width; k += N)
        visit(k, fetch_packs<N>(row.x, row.width, k));
#endif
}

// The sums of x - centre and of its square over the packs of a group that exist.
__device__ __forceinline__ Pair<A> sums_of(const Row& row, Index first, const Group& group, A centre) {
    Pair<A> sums = {0, 0};
#pragma unroll
    for (int i = 0; i < GROUP; ++i) {
        if (column_of(first + i) < row.width) sums += deviations_of(group.at[i], centre);
    }
    return sums;
}

// The thread's share of the same sums over a row, in double and from memory: rare, in little code.
__device__ __forceinline__ Pair<double> share_in_double(const Row& row, A centre) {
    Pair<double> sums = {0, 0};
#pragma unroll 1
    for (Index k = 0; column_of(k) < row.width; ++k)
#pragma unroll 1
        for (int i = 0; i < VEC; ++i) {
            const double deviation = to_double(row.x[column_of(k) + i]) - exactly(centre);
            sums.first += deviation;
            sums.second = fused(deviation, deviation, sums.second);
        }
    return sums;
}

// The thread's share of the sum over a row. It adds up distances from its own first element: as
// small as the row allows, and 0 in a row of equal elements.
__device__ __forceinline__ double share_of_sum(const Row& row) {
    A centre = {0};
    double sum = 0;
    Index packs = 0;
    for_each_group(row, [&](Index first, const Group& group) {
        if (first == 0) centre = widen(group.at[0].at(0));
        sum += exactly(sums_of(row, first, group, centre).first);
#pragma unroll
        for (int i = 0; i < GROUP; ++i) packs += column_of(first + i) < row.width;
    });
    if (!(fabs(sum) <= LARGEST)) return share_in_double(row, A{0}).first;  // a distance overflowed
    return fused(static_cast<double>(packs * VEC), exactly(centre), sum);
}

// Whether all that a thread holds of a row is equal to `centre`.
__device__ __forceinline__ bool all_equal(const Row& row, A centre) {
    u32 apart = 0;
#if CHUNKS
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
#pragma unroll
        for (int k = 0; k < VEC; ++k)
            if (column_of(i) < row.width)
                apart |= __float_as_uint(narrow<f32>(widen(row.held.at[i].at(k)) - centre)) << 1;
#endif
    return CHUNKS && apart == 0;
}

// The thread's share of the sums of x - centre and of its square over a row.
__device__ __forceinline__ Pair<double> share_of_moments(const Row& row, A centre) {
    Pair<double> sums = {0, 0};
    for_each_group(row, [&](Index first, const Group& group) {
        const Pair<A> part = sums_of(row, first, group, centre);
        sums.first += exactly(part.first);
        sums.second += exactly(part.second);
    });
    const bool exact = sizeof(DATA_T) == 8 || squares_held(sums.second);
    if (exact || (sums.second == 0 && all_equal(row, centre))) return sums;
    return share_in_double(row, centre);
}

struct Moments { double mean, variance; };

struct Slots {
    RowSlots<double> sums;
    RowSlots<Pair<double>> moments;
};

// `share` is 1 / width. All threads of the block must call it, also for a row beyond the last.
__device__ __forceinline__ Moments moments_of(
    const Row& row, double share, Slots& slots, int turn
) {
    A centre = {0};
    if (CENTRED) centre = narrow<A>(__dmul_rn(sums_of_row(share_of_sum(row), slots.sums, turn), share));
    const Pair<double> sums = sums_of_row(share_of_moments(row, centre), slots.moments, turn);
    const double correction = CENTRED ? __dmul_rn(sums.first, share) : 0;
    const double variance = fused(-correction, correction, __dmul_rn(sums.second, share));
    return {exactly(centre) + correction, variance < 0 ? 0 : variance};
}

__device__ __forceinline__ void normalize_row(
    const Layout& layout, const Row& row, const PARAM_T* scale, const PARAM_T* bias, DATA_T* y,
    double mean, A inv_std
) {
    // The mean in two parts: a single one is off by half a unit in the last place, which may be
    // large compared with x - mean.
    const A high = narrow<A>(mean), low = narrow<A>(mean - exactly(high));
    for_each_group<NORMALIZED>(row, [&](Index first, const Packs<NORMALIZED>& group) {
#pragma unroll
        for (int i = 0; i < NORMALIZED; ++i) {
            const Index column = column_of(first + i);
            if (column >= row.width) continue;
            A values[VEC], factor[VEC], offset[VEC];
            load_or<VEC>(scale, column, A{1}, factor);
            load_or<VEC>(bias, column, A{0}, offset);
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                const A x = widen(group.at[i].at(k)), deviation = CENTRED ? x - high - low : x;
                values[k] = fused(deviation * inv_std, shifted(layout, factor[k]), offset[k]);
            }
            store_data(y + column, values);
        }
    });
}

// Addresses of rows at strides take registers.
extern "C" __global__ void __launch_bounds__(STRIDED || CLUSTERED ? 512 : 1024, 1) IN_CLUSTERS layer_norm(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, DATA_T* y, STAT_T* mean,
    STAT_T* inv_std, i64 rows, i64 width, double eps
#if STRIDED
    , const __grid_constant__ Layout layout, const DATA_T* residual, DATA_T* s
#endif
) {
#if !STRIDED
    const Layout layout = {};
#endif
    __shared__ Slots slots;
    const i64 step = static_cast<i64>(gridDim.x / ROW_BLOCKS) * blockDim.y;
    const double share = 1.0 / width;
    const i64 end = (sample() + 1) * rows;
    i64 first = sample() * rows + static_cast<i64>(blockIdx.x / ROW_BLOCKS) * blockDim.y;
    scale = of_sample(scale, width);
    bias = of_sample(bias, width);
#if CLUSTERED
    cluster_barrier();
#endif
    for (int turn = 0; first < end; first += step, ++turn) {
        const i64 row = first + threadIdx.y;
        const bool inside = row < end;
        const Place place = place_of(layout, row);
        const DATA_T* from = x + start_of(layout, X, place, width);
        const Index columns = inside ? static_cast<Index>(width) : 0;
#if ADDED
        const Row own = add_row(
            from, residual + start_of(layout, RESIDUAL, place, width),
            s + start_of(layout, S, place, width), columns
        );
#else
        const Row own = fetch_row(from, columns);
#endif
        const Moments of = moments_of(own, share, slots, turn);
        if (!inside) continue;
        const double factor = 1 / sqrt(of.variance + eps);
        if (row_thread() == 0) {
            if (CENTRED) mean[row] = narrow<STAT_T>(of.mean);
            inv_std[row] = narrow<STAT_T>(factor);
        }
        DATA_T* to = y + start_of(layout, Y, place, width);
        normalize_row(layout, own, scale, bias, to, of.mean, narrow<A>(factor));
    }
}
