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
// Elements of 16 bits are summed in float over what a thread loads at once, f32 over an access; then in
// double, for which many GPUs have few units. Squares, of distances from the mean as a float, are summed
// in float over what it loads at once. If a sum overflows or a square loses digits, the thread sums
// again in double. The sum of f32's and f64's distances corrects their mean.
//
// Launch: blockDim = (threads per row, rows per block), x a power of two below 32 or a multiple of
// 32, x * y a multiple of 32 and at most 512; any gridDim.x; gridDim.z samples
// (row_starts.cuh). width > 0. If VEC > 1, width is a multiple of VEC and arrays are aligned for packs
// (with a `layout`, only scale and bias). If CHUNKS > 0, x * CHUNKS * VEC >= width: a thread then loads
// its part of a row once, all loads in flight together, unless STRIDED while it works on the row
// before, and keeps it in registers. With CHUNKS = 0 a row may have any length, and is read once for
// each of its sums and again for y.
//
// CLUSTERED = 1, with CHUNKS > 0: a row has a cluster of blocks (cluster.cuh). blockDim = (x, 1), x a
// multiple of 32 and at most 512 with CLUSTER * x * CHUNKS * VEC >= width; gridDim.x a multiple of
// CLUSTER.

#include "abreast.cuh"
#include "row_starts.cuh"
#include "rows.cuh"

#ifndef CLUSTERED
#define CLUSTERED 0
#endif

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
// Packs in flight in the loop of a sum, which may read two arrays and has few registers.
constexpr int SUMMED = CHUNKS ? GROUP : 1;
// Packs in flight in the loop of y: fewer of a row that is not held, whose scale and bias are loaded with it.
constexpr int NORMALIZED = CHUNKS ? GROUP : 2;

// A thread reads a row ahead, unless registers are short: at strides, of a residual of doubles. And it keeps its columns
// of scale and bias for all rows, unless they are many. Beside a residual of 16 bits and a mean there is room for one of
// both; a row of a cluster, which waits more for instructions, has scale and bias.
constexpr bool ONE_OF_BOTH = ADDED && CENTRED && sizeof(DATA_T) == 2 && CHUNKS * words<Raw<DATA_T, VEC>>() > 8;
constexpr bool AHEAD = CHUNKS && !STRIDED && !(ADDED && sizeof(A) == 8 && CHUNKS > 1) && !(ONE_OF_BOTH && CLUSTERED);
constexpr bool KEEP = CHUNKS && !(ADDED && STRIDED) && !(ONE_OF_BOTH && AHEAD) && CHUNKS * words<Raw<PARAM_T, VEC>>() <= 16;

// The number of blocks that share a row; the slots of one sum, and the sum over the threads of a row.
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

// Keeps compilers from knowing how a pack of 16-bit numbers was computed.
template <typename T> __device__ __forceinline__ void hide(Raw<T, VEC>& pack) {
#ifndef GRADKIT_EMULATED
    if constexpr (Raw<T, VEC>::PER_WORD == 2)
#pragma unroll
        for (int k = 0; k < Raw<T, VEC>::WORDS; ++k) asm volatile("" : "+r"(pack.word[k]));
#endif
}

// The numbers of arrays in a layout.
enum { X, Y, RESIDUAL, S };

// A float holds the sum of some numbers of 16 bits without an error, if they are about as large; where
// they are not, the error is small beside their distances.
constexpr bool HALVES = sizeof(DATA_T) == 2;

// Distances of packs' elements from a centre; 0 beyond the end of the row.
template <int N> struct Deviations { A at[N][VEC]; };

// A thread's part of a row.
struct Row {
    const DATA_T* x;  // the thread's first element
    Index width;      // 0 for a row beyond the last
#if CHUNKS
    Group held;
    Group residual;           // if ADDED
    Deviations<GROUP> away;  // once there is a mean
#endif
};

// A thread's number in its row.
__device__ __forceinline__ int row_thread() {
    return static_cast<int>(blockIdx.x % ROW_BLOCKS * blockDim.x + threadIdx.x);
}

// The distance of a thread's k-th pack from its first, and the first column of that pack.
__device__ __forceinline__ Index offset_of(Index k) {
    return k * static_cast<int>(ROW_BLOCKS * blockDim.x * VEC);
}
__device__ __forceinline__ Index column_of(Index k) { return offset_of(k) + row_thread() * VEC; }

// A thread's packs from the k-th on; zeros beyond the end of the row.
template <int N>
__device__ __forceinline__ Packs<N> fetch_packs(const DATA_T* x, Index width, Index k) {
    Packs<N> group;
#pragma unroll
    for (int i = 0; i < N; ++i)
        group.at[i] = fetch_data(column_of(k + i) < width, x + offset_of(k + i));
    return group;
}

// Writes s = x + residual for the thread's packs from the k-th on; returns it.
__device__ __forceinline__ Packs<SUMMED> add_packs(
    Packs<SUMMED> sums, const Packs<SUMMED>& more, DATA_T* s, Index width, Index k
) {
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
        A values[VEC];
#pragma unroll
        for (int j = 0; j < VEC; ++j) values[j] = widen(sums.at[i].at(j)) + widen(more.at[i].at(j));
        sums.at[i] = narrow_all<DATA_T>(values);
        if (column_of(k + i) < width) store_data(s + offset_of(k + i), sums.at[i]);
    }
    return sums;
}

__device__ __forceinline__ Row fetch_row(const DATA_T* x, const DATA_T* residual, Index width) {
    Row row = {x, width};
#if CHUNKS
    row.held = fetch_packs<GROUP>(x, width, 0);
    if (ADDED) row.residual = fetch_packs<GROUP>(residual, width, 0);
#endif
    return row;
}

// Makes a row one of s, of which a thread reads again only what it has written itself.
__device__ __forceinline__ void add_residual(Row& row, const DATA_T* residual, DATA_T* s) {
#if CHUNKS
    row.held = add_packs(row.held, row.residual, s, row.width, 0);
#else
    const auto fetch = [&](const DATA_T* from, Index k) { return fetch_packs<SUMMED>(from, row.width, k); };
    for (Index k = 0; column_of(k) < row.width; k += SUMMED)
        add_packs(fetch(row.x, k), fetch(residual, k), s, row.width, k);
#endif
    row.x = s;
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

// The sum of a pack's numbers, in pairs: equal ones add up without a rounding error.
__device__ __forceinline__ A pairwise(const A (&numbers)[VEC]) {
    A sums[VEC];
#pragma unroll
    for (int k = 0; k < VEC; ++k) sums[k] = numbers[k];
#pragma unroll
    for (int left = VEC / 2; left >= ABREAST; left /= 2)
#pragma unroll
        for (int k = 0; k < left; k += ABREAST)
            put_numbers(sums, k, numbers_at(sums, k) + numbers_at(sums, k + left));
    return ABREAST > 1 ? sums[0] + sums[1] : sums[0];
}

// The thread's share of the sums of x - centre and of its square over a row, in double and from
// memory: rare, in little code.
__device__ __forceinline__ Pair<double> share_in_double(const Row& row, A centre) {
    Pair<double> sums = {0, 0};
#pragma unroll 1
    for (Index k = 0; column_of(k) < row.width; ++k)
#pragma unroll 1
        for (int i = 0; i < VEC; ++i) {
            const double deviation = to_double(row.x[offset_of(k) + i]) - exactly(centre);
            sums.first += deviation;
            sums.second = fused(deviation, deviation, sums.second);
        }
    return sums;
}

// The thread's share of the sum over a row.
__device__ __forceinline__ double share_of_sum(const Row& row) {
    double sum = 0;
    for_each_group(row, [&](Index, const Group& group) {
        A totals[VEC];
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
#pragma unroll
            for (int k = 0; k < VEC; k += ABREAST) {
                const Numbers x = numbers_at(group.at[i], k);
                put_numbers(totals, k, HALVES && i ? numbers_at(totals, k) + x : x);
            }
            if (!HALVES || i == GROUP - 1) sum += exactly(pairwise(totals));
        }
    });
    return fabs(sum) <= LARGEST ? sum : share_in_double(row, A{0}).first;
}

// Distances of the thread's packs from the `first`-th on.
template <int N>
__device__ __forceinline__ Deviations<N> deviations_of(
    const Packs<N>& packs, Index width, Index first, A centre
) {
    Deviations<N> away;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const Numbers from = each(column_of(first + i) < width ? centre : A{0});
#pragma unroll
        for (int k = 0; k < VEC; k += ABREAST) {
            const Numbers x = numbers_at(packs.at[i], k);
            put_numbers(away.at[i], k, CENTRED ? x - from : x);
        }
    }
    return away;
}

// Calls visit(k, deviations of the thread's packs from the k-th on) until the row ends; of N of them
// at once, if it does not hold the row.
template <int N = GROUP, typename F>
__device__ __forceinline__ void for_each_deviation(const Row& row, A centre, F visit) {
#if CHUNKS
    visit(0, row.away);
#else
    for_each_group<N>(row, [&](Index first, const Packs<N>& packs) {
        visit(first, deviations_of(packs, row.width, first, centre));
    });
#endif
}

// True if all that a thread holds of a row is equal to the centre.
__device__ __forceinline__ bool all_equal(const Row& row) {
    u32 apart = 0;
#if CHUNKS
#pragma unroll
    for (int i = 0; i < GROUP; ++i)
#pragma unroll
        for (int k = 0; k < VEC; ++k) apart |= __float_as_uint(narrow<f32>(row.away.at[i][k])) << 1;
#endif
    return CHUNKS && apart == 0;
}

// The thread's share of the sums of x - centre, unless HALVES, and of its square over a row.
__device__ __forceinline__ Pair<double> share_of_moments(const Row& row, A centre) {
    Pair<double> sums = {0, 0};
    for_each_deviation(row, centre, [&](Index, const Deviations<GROUP>& away) {
        A sum = {0}, squares[VEC];
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            sum += pairwise(away.at[i]);
#pragma unroll
            for (int k = 0; k < VEC; k += ABREAST) {
                const Numbers x = numbers_at(away.at[i], k);
                put_numbers(squares, k, i ? fused(x, x, numbers_at(squares, k)) : x * x);
            }
        }
        sums.first += exactly(sum);
        sums.second += exactly(pairwise(squares));
    });
    const bool exact = sizeof(DATA_T) == 8 || squares_held(sums.second);
    if (exact || (sums.second == 0 && all_equal(row))) return sums;
    return share_in_double(row, centre);
}

struct Slots {
    RowSlots<double> sums, squares;
    RowSlots<Pair<double>> moments;
};

// Numbers of the normalised row: y = ((x - centre) * inv_std + shift) * scale + bias.
struct Statistics { double mean, inv_std; A centre, shift; };

// `share` is 1 / width. All threads of the block must call it, also for a row beyond the last.
__device__ __forceinline__ double mean_of(const Row& row, double share, Slots& slots, int turn) {
    return CENTRED ? __dmul_rn(sums_of_row(share_of_sum(row), slots.sums, turn), share) : 0;
}

// The same, once the row's distances from the mean are known.
__device__ __forceinline__ Statistics statistics_of(
    const Row& row, double mean, A centre, double share, double eps, Slots& slots, int turn
) {
    const Pair<double> own = share_of_moments(row, centre);
    double off = mean - exactly(centre), squares;
    if (HALVES || !CENTRED) {
        squares = sums_of_row(own.second, slots.squares, turn);
    } else {
        const Pair<double> sums = sums_of_row(own, slots.moments, turn);
        off = __dmul_rn(sums.first, share);
        squares = sums.second;
    }
    const double variance = fused(-off, off, __dmul_rn(squares, share));
    const double inv_std = 1 / sqrt((variance < 0 ? 0 : variance) + eps);
    return {exactly(centre) + off, inv_std, centre, narrow<A>(off == 0 ? 0 : __dmul_rn(-off, inv_std))};
}

// The scale and the bias of a pack; 1 and 0 if a parameter is null.
struct Columns { Raw<PARAM_T, VEC> scale, bias; };

// Loads scale and bias of the thread's k-th pack.
__device__ __forceinline__ Columns fetch_columns(
    const PARAM_T* scale, const PARAM_T* bias, i64 width, Index k
) {
    const Index column = column_of(k);
    const bool inside = column < width;
    Columns own = {};
    own.scale = fetch_if<VEC>(scale && inside, scale + column, narrow<PARAM_T>(A{1}));
    if (CENTRED) own.bias = fetch_if<VEC>(bias && inside, bias + column, narrow<PARAM_T>(A{0}));
    return own;
}

// Writes y, from the thread's first element of it on.
__device__ __forceinline__ void normalize_row(
    const Layout& layout, const Row& row, const PARAM_T* scale, const PARAM_T* bias,
    const Columns (&kept)[GROUP], DATA_T* y, const Statistics& of
) {
    const Numbers inv_std = each(narrow<A>(of.inv_std)), shift = each(of.shift);
    for_each_deviation<NORMALIZED>(row, of.centre, [&](Index first, const Deviations<NORMALIZED>& away) {
#pragma unroll
        for (int i = 0; i < NORMALIZED; ++i) {
            const bool inside = column_of(first + i) < row.width;
            if (!KEEP && !inside) continue;
            Columns own = KEEP ? kept[i] : fetch_columns(scale, bias, row.width, first + i);
            if (KEEP) {  // or they are widened once for all rows, and take twice the registers
                hide(own.scale);
                if (CENTRED) hide(own.bias);
            }
            A values[VEC];
#pragma unroll
            for (int k = 0; k < VEC; k += ABREAST) {
                const Numbers x = numbers_at(away.at[i], k), factor = shifted(layout, numbers_at(own.scale, k));
                const Numbers bias = numbers_at(own.bias, k);
                put_numbers(values, k, CENTRED ? fused(fused(x, inv_std, shift), factor, bias) : x * inv_std * factor);
            }
            Raw<DATA_T, VEC> rounded = narrow_all<DATA_T>(values);
            // Or each pack is computed behind its condition, and packs wait for each other.
            if (KEEP) hide(rounded);
            if (inside) store_data(y + offset_of(first + i), rounded);
        }
    });
}

extern "C" __global__ void __launch_bounds__(512, CHUNKS || STRIDED ? 1 : 2) IN_CLUSTERS layer_norm(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, DATA_T* y, STAT_T* mean,
    STAT_T* inv_std, i64 rows, i64 width, double eps
#if FURTHER
    , const __grid_constant__ Layout layout, const DATA_T* residual, DATA_T* s
#endif
) {
#if !FURTHER
    const Layout layout = {};
    const DATA_T* residual = nullptr;
    DATA_T* s = nullptr;
#endif
    __shared__ Slots slots;
    const i64 step = static_cast<i64>(gridDim.x / ROW_BLOCKS) * blockDim.y;
    const double share = 1.0 / width;
    const i64 end = (sample() + 1) * rows;
    i64 first = sample() * rows + static_cast<i64>(blockIdx.x / ROW_BLOCKS) * blockDim.y;
    scale = of_sample(scale, width);
    bias = of_sample(bias, width);
    // From here on of a thread's first column.
    x += column_of(0);
    y += column_of(0);
    if (ADDED) {
        residual += column_of(0);
        s += column_of(0);
    }
    const auto begin_of = [&](int array, const Place& place) { return start_of(layout, array, place, width); };
    const auto read = [&](i64 row, const Place& place) {
        const DATA_T* more = ADDED ? residual + begin_of(RESIDUAL, place) : nullptr;
        return fetch_row(x + begin_of(X, place), more, row < end ? static_cast<Index>(width) : 0);
    };
    Columns kept[GROUP];
#pragma unroll
    for (int k = 0; k < GROUP; ++k)
        if (KEEP) kept[k] = fetch_columns(scale, bias, width, k);
    Row next;
    if (AHEAD) next = read(first + threadIdx.y, place_of(layout, first + threadIdx.y));
#if CLUSTERED
    cluster_barrier();
#endif
    for (int turn = 0; first < end; first += step, ++turn) {
        const i64 row = first + threadIdx.y;
        const Place place = place_of(layout, row);
        Row own = AHEAD ? next : read(row, place);
        if (ADDED) add_residual(own, residual + begin_of(RESIDUAL, place), s + begin_of(S, place));
        const double average = mean_of(own, share, slots, turn);
        const A centre = narrow<A>(average);
#if CHUNKS
        own.away = deviations_of(own.held, own.width, 0, centre);
#endif
        if (AHEAD) next = read(row + step, place_of(layout, row + step));
        const Statistics of = statistics_of(own, average, centre, share, eps, slots, turn);
        if (row < end) {
            if (row_thread() == 0) {
                if (CENTRED) mean[row] = narrow<STAT_T>(of.mean);
                inv_std[row] = narrow<STAT_T>(of.inv_std);
            }
            normalize_row(layout, own, scale, bias, kept, y + begin_of(Y, place), of);
        }
    }
}
