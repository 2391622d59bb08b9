// Gradients of layer norm and RMS norm, from their input or output; each row is read once.
//
//   xhat = (x - mean) * inv_std     (RMS: x * inv_std; from the output: (y - bias) / scale)
//   dx      = inv_std * (w - mean(w) - xhat * mean(w * xhat)),  w = dy * scale; ADDED: + ds
//   partials[0][block][column] = sum over the block's rows of dy * xhat
//   partials[1][block][column] = the same sum of dy (not for RMS)
//
// dy, source, dx: (rows, width) of DATA_T, C order, or strided by `layout` (row_starts.cuh); dx may
// be dy, or null unless ADDED. ds: the same, or null; dx may be ds. scale, bias: width of PARAM_T or null. mean, inv_std: rows of STAT_T. partials: (PLANES, samples, gridDim.x, width) of the accumulation dtype, or null if
// no parameter gradient is computed. All outputs are written with =. Deterministic: fixed orders, no
// atomics.
//
// Launch: blockDim = (threads per row, rows per block), x a power of two below 32 or a multiple of
// 32, with x * CHUNKS * VEC >= width, x * y a multiple of 32 and at most 512 (256 if y > 1); any
// gridDim.x; gridDim.z samples (row_starts.cuh), 1 if FROM_OUTPUT. If VEC > 1, width is a multiple of
// VEC unless ODD, and arrays are aligned for packs (with a `layout`, only scale, bias and partials). ODD
// rows (chunks.cuh) have at least 2 * VEC + 2 packs, of which x * CHUNKS are all but one, x is at least
// 3 * VEC - 1, x * y at most 256 if CHUNKS is 1, LONG and FROM_OUTPUT are 0, and with a `layout` PIECE is 1.
// If LONG, x is THREADS, y is 1, and dynamic shared memory has PLANES * CHUNKS * VEC * x elements of type A;
// if LONG is 2, CHUNKS * VEC * x of PARAM_T follow.
//
// A thread keeps the sums of its columns in registers for all its rows, and its columns of 1 / scale (INVERSES) and
// of scale (KEEP_SCALE) if there are enough registers; otherwise it rereads scale from the cache, and divides by it, or
// keeps 1 / scale in shared memory (IN_SHARED).
// LONG rows have too many columns: their sums are in shared memory, and so is scale if LONG is 2. A thread
// keeps a row in the dtype of memory, which for 16 bits takes half as many registers as w and xhat,
// and computes those twice.

#include "chunks.cuh"
#include "registers.cuh"
#include "row_gradient.cuh"

// ODD rows of one pack a thread, of at most 96 threads.
constexpr bool SHORT_ODD = ACROSS && CHUNKS == 1;

// A block's: exactly, so that compilers know how far apart chunks are, if LONG; at most, otherwise.
#ifndef THREADS
#define THREADS (SHORT_ODD ? MERGED_THREADS : 512)
#endif

// Threads per row.
__device__ __forceinline__ int threads() { return LONG ? THREADS : static_cast<int>(blockDim.x); }

__device__ __forceinline__ int column_of(int chunk, int width) {
    const int own = static_cast<int>(threadIdx.x);
    if (is_border(chunk)) return own < VEC ? own : packed(width) - 2 * VEC + own;
    return (chunk * threads() + own + ODD) * VEC;
}

__device__ __forceinline__ bool is_inside(int chunk, int width) {
    return is_inside(chunk, column_of(chunk, width), width);
}

// The distance of a chunk's columns from those of the thread's first chunk.
__device__ __forceinline__ i64 chunk_offset(int chunk, int width) {
    if (is_border(chunk)) return column_of(chunk, width) - column_of(0, width);
    return static_cast<i64>(chunk * threads() * VEC);
}

// Registers that a row takes in the dtype of memory, its ds, a parameter, and a number for each column.
constexpr int PACK = words<Raw<DATA_T, VEC>>();
constexpr int RAW_ROW = 2 * (CHUNKS * (1 + ACROSS) * PACK + ODD);
constexpr int ROW_OF_DS = CHUNKS * PACK + ODD;
constexpr int PARAMETER = CHUNKS * words<Raw<PARAM_T, VEC>>() + ODD;
constexpr int NUMBERS = (CHUNKS * VEC + ODD) * words<A>();

// 1 / scale of all columns, if there are registers for it beside scale and bias, and none are needed for addresses;
// otherwise a row's xhat is kept in place of its source.
constexpr int WITH_INVERSES = RAW_ROW + (PLANES + 1) * NUMBERS + (ADDED ? ROW_OF_DS : 0) + (1 + HAS_BIAS) * PARAMETER;
constexpr bool INVERSES = FROM_OUTPUT && !LONG && !STRIDED &&
    needed(ALL_CHUNKS) + WITH_INVERSES <= registers(512, 1);

// Otherwise 1 / scale of sixteen columns is in shared memory, 32 KiB of it: registers leave room for one block anyway.
constexpr bool IN_SHARED = FROM_OUTPUT && !INVERSES && !LONG && !STRIDED && CHUNKS * VEC == 16 && sizeof(A) == 4;
typedef Pack<A, VEC> Inverses;

// What a row takes (with xhat and a division, if FROM_OUTPUT without INVERSES), and what all rows share.
constexpr int ROW = FROM_OUTPUT && !INVERSES ? CHUNKS * PACK + NUMBERS + 3 * words<A>() : RAW_ROW;
constexpr int SHARED = LONG ? 0 : (PLANES + INVERSES) * NUMBERS;
constexpr int TAKEN = needed(ALL_CHUNKS) + ROW + SHARED;

// Two blocks are resident if there are registers for that, and at most eight columns: of twelve, scale would be
// read from the cache, in four more round trips. Of SHORT_ODD rows three are, where a row's loads are in flight at
// once all the same: ptxas would take more registers than it needs.
constexpr bool THREE_BLOCKS = SHORT_ODD && !SINCE_10;
constexpr int BIAS = HAS_BIAS && INVERSES ? PARAMETER : 0;
constexpr bool TWO_BLOCKS = !LONG && CHUNKS * VEC * words<A>() <= 8 && TAKEN + BIAS <= registers(512, 2);
constexpr int BLOCKS = THREE_BLOCKS ? 3 : TWO_BLOCKS ? 2 : 1;

// True if a row is left early where dx is null.
constexpr bool LEFT = LEFT_EARLY && !ODD;

// Other rows wait for instructions, and not for memory.
constexpr bool WAITS_FOR_MEMORY = !LONG && !STRIDED && !ODD && VEC > 1;

// Beside ds numbers that are computed with as memory has them, one by one, need fewer registers; before 7.5 all more.
constexpr int LESS = !ADDED ? 0 : CAPABILITY < 750 ? -16 : sizeof(DATA_T) == 4 && !STRIDED && !TWO_AT_ONCE ? 12 : 0;

// More beside a row that is read ahead: of two sums with an offset at once, or 1 / scale beside ds.
constexpr int MORE = FURTHER && SINCE_10 ? 16 : ADDED && INVERSES && CAPABILITY > 800 && CAPABILITY < 900 ? 12 : 0;

// Further values in registers. ds as doubles spills for sm_120, and a long bias as doubles at strides for sm_70.
struct Kept { bool ds, scale, next, bias, xhat; };
constexpr Kept kept() {
    Room room = {registers(THREE_BLOCKS ? THREADS : 512, BLOCKS) - TAKEN + LESS};
    Kept found = {};
    // With INVERSES a bias is kept for all rows beside scale, or is done with before dx is computed, from xhat. Of 16 bits
    // ptxas keeps some of the widened numbers too.
    const int widened = sizeof(DATA_T) > 2 ? 0 : VEC > 1 ? 14 : 24;
    found.xhat = FROM_OUTPUT && (!INVERSES || (HAS_BIAS && 2 * PARAMETER + widened > room.left));
    if (HAS_BIAS && !found.xhat) room.left -= PARAMETER + widened;
    if (INVERSES && found.xhat) room.left -= NUMBERS - CHUNKS * PACK;
    found.bias = HAS_BIAS && (!found.xhat || (LONG && !(STRIDED && sizeof(A) == 8)) || PARAMETER <= room.left);
    found.ds = ADDED && (BLOCKS == 1 || !STRIDED) && sizeof(A) == 4 && room.keeps(ROW_OF_DS);
    found.scale = LONG < 2 && !(ADDED && (STRIDED || LONG)) && room.keeps(PARAMETER);
    found.next = WAITS_FOR_MEMORY && room.keeps(ROW + CHUNKS + MORE);
    return found;
}
constexpr bool DS_EARLY = kept().ds, DS_WITH_ROW = DS_EARLY && !kept().next;
constexpr bool KEEP_SCALE = kept().scale;
constexpr bool AHEAD = kept().next;
constexpr bool KEEP_XHAT = kept().xhat;
constexpr bool KEEP_BIAS = kept().bias && !KEEP_XHAT;
constexpr bool BIAS_AT_ONCE = kept().bias && KEEP_XHAT;

// ptxas computes what it can before it issues the last loads of a row, which then come in a second
// round trip. So statistics are read before the elements, or behind them if these are many or there
// is no mean. Where NEVER_EARLY, they stay as they are beyond the last column, and xhat is made 0 there.
constexpr bool STATISTICS_FIRST = STRIDED || (!LONG && CENTRED);
constexpr bool NEVER_EARLY =
    LONG ? LONG == 1 && (STRIDED || sizeof(DATA_T) == 2)
         : (VEC == 1 && sizeof(DATA_T) == 2) || (FROM_OUTPUT && STRIDED && sizeof(A) == 8);

// A thread's part of a row. Its loads are in flight until it is used.
struct Row {
    Part part[ALL_CHUNKS];
    Part behind[CHUNKS];  // if ACROSS: packs of memory, behind those
    Raw<DATA_T, VEC> ds[ALL_CHUNKS];  // if DS_EARLY
    RawStatistics of;
#if FROM_OUTPUT
    Numbers xhat[KEEP_XHAT ? CHUNKS : 1][VEC];  // kept by `sum_row`, in place of the source: a division takes long
#endif
};

// Moves a thread's own packs out of those of memory.
__device__ __forceinline__ void move_own(Row& at, u32 lead) {
    by_words<Raw<DATA_T, VEC>::WORDS - 1>(lead, [&](auto whole) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            at.part[c].dy = across(whole, at.part[c].dy, at.behind[c].dy, lead);
            at.part[c].source = across(whole, at.part[c].source, at.behind[c].source, lead);
        }
    });
}

// Issues all loads of a row. Beyond the last row and column everything is 0.
__device__ __forceinline__ void fetch_row(const Arrays& in, i64 row, i64 rows, int width, Row& to) {
    const Place place = place_of(in.layout, row);
    const u32 lead = ACROSS ? lead_of(row, width) : 0;
    const int first = column_of(0, width) - static_cast<int>(lead);
    const int from = VEC == 8 && !STRIDED ? 0 : first;  // 0 takes fewer instructions, and a register more
    const DATA_T* dy = in.dy + start_of(in.layout, DY, place, width) + from;
    const DATA_T* source = in.source + start_of(in.layout, SOURCE, place, width) + from;
    const DATA_T* ds = DS_WITH_ROW ? in.ds + start_of(in.layout, DS, place, width) + from : nullptr;
    const bool exists = LONG || row < rows;
    if (STATISTICS_FIRST) to.of = fetch_statistics(in, exists, row);
#pragma unroll
    for (int c = 0; c < ALL_CHUNKS; ++c) {
        const bool inside = exists && is_inside(c, width);
        const i64 offset = is_border(c) ? column_of(c, width) - from : chunk_offset(c, width) + (first - from);
        to.part[c].dy = fetch_chunk(c, inside, dy + offset);
        to.part[c].source = fetch_chunk(c, inside, source + offset);
        if (DS_WITH_ROW) to.ds[c] = fetch_chunk(c, inside, ds + offset);
        if (!ACROSS || is_border(c)) continue;
        to.behind[c].dy = fetch_data(inside && lead, dy + offset + VEC);
        to.behind[c].source = fetch_data(inside && lead, source + offset + VEC);
    }
    if (!STATISTICS_FIRST) to.of = fetch_statistics(in, exists, row);
}

// Issues the loads of a row's ds: it is needed last, so a row that was read ahead has it from its own turn on.
__device__ __forceinline__ void fetch_ds(const Arrays& in, i64 row, i64 rows, int width, Row& to) {
    const DATA_T* ds = in.ds + start_of(in.layout, DS, place_of(in.layout, row), width) + column_of(0, width);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        to.ds[c] = fetch_data(row < rows && is_inside(c, width), ds + chunk_offset(c, width));
}

// Registers of a thread for all its rows: its columns of scale, its inverse and bias, and their sums.
struct Columns {
    Raw<PARAM_T, VEC> scale[ALL_CHUNKS];  // if KEEP_SCALE
    Raw<PARAM_T, VEC> bias[ALL_CHUNKS];  // if KEEP_BIAS
    A inverse[INVERSES ? ALL_CHUNKS : 1][VEC];
    Inverses* shared;  // if IN_SHARED: the thread's, of each chunk THREADS behind the last
#if LONG
    A* sums;
    // Neighbouring threads use neighbouring words, so there are no bank conflicts.
    __device__ __forceinline__ A& sum(int plane, int c, int k) {
        return sums[((plane * CHUNKS + c) * VEC + k) * THREADS + threadIdx.x];
    }
    // If LONG is 2: a thread's own columns, which no other reads.
    __device__ __forceinline__ Raw<PARAM_T, VEC>& shared_scale(int c) const {
        A* behind = sums + PLANES * CHUNKS * VEC * THREADS;
        return reinterpret_cast<Raw<PARAM_T, VEC>*>(behind)[c * THREADS + threadIdx.x];
    }
    __device__ __forceinline__ explicit Columns(A* shared) : sums(shared) {}
#else
    A sums[PLANES][ALL_CHUNKS][VEC];
    __device__ __forceinline__ A& sum(int plane, int c, int k) { return sums[plane][c][k]; }
    __device__ __forceinline__ explicit Columns(A*) {}
#endif
    __device__ __forceinline__ Numbers inverse_at(int c, int k) const {
        if (IN_SHARED) return numbers_at(shared[c * THREADS].at, k);
        return INVERSES ? numbers_at(inverse[c], k) : Numbers{};
    }
};

// A parameter's values for a chunk. Beyond the last column, and if it is null, `absent`.
__device__ __forceinline__ Raw<PARAM_T, VEC> fetch_columns(const PARAM_T* from, int c, int width, A absent) {
    return fetch_parameter(c, from && is_inside(c, width), from + column_of(c, width), absent);
}

__device__ __forceinline__ Raw<PARAM_T, VEC> scale_of(const PARAM_T* scale, const Columns& own, int c, int width) {
#if LONG == 2
    return own.shared_scale(c);
#else
    return KEEP_SCALE ? own.scale[c] : fetch_columns(scale, c, width, A{1});
#endif
}

__device__ __forceinline__ Raw<PARAM_T, VEC> bias_of(const PARAM_T* bias, const Columns& own, int c, int width) {
    return KEEP_BIAS ? own.bias[c] : fetch_columns(bias, c, width, A{0});
}

__device__ __forceinline__ void clear(Columns& own) {
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
        for (int c = 0; c < ALL_CHUNKS; ++c)
#pragma unroll
            for (int k = 0; k < VEC; ++k)
                if (has(c, k)) own.sum(plane, c, k) = A{0};
}

// Adds to the column sums; returns the thread's row sums.
__device__ __forceinline__ Pair<A> sum_row(
    const Arrays& in, const Statistics& of, int width, Columns& own, Row& at
) {
    // Read again for each row, from the cache: no registers are left.
    Raw<PARAM_T, VEC> biases[ALL_CHUNKS] = {};
    if (HAS_BIAS && BIAS_AT_ONCE)
#pragma unroll
        for (int c = 0; c < ALL_CHUNKS; ++c) biases[c] = fetch_columns(in.bias, c, width, A{0});
    Pair<A> sums = {0, 0};
#pragma unroll
    for (int c = 0; c < ALL_CHUNKS; ++c) {
        if (HAS_BIAS && !BIAS_AT_ONCE) biases[c] = bias_of(in.bias, own, c, width);
        // Beyond the last column xhat is 0. With the row's statistics it could overflow, and
        // 0 * xhat would be NaN.
        const bool inside = is_inside(c, width);
        if (ACROSS && is_border(c) && !inside) continue;  // as nearly all threads
        const Statistics here = NEVER_EARLY || inside ? of : Statistics{0, 0};
        const Parameters parameters = {scale_of(in.scale, own, c, width), biases[c]};
#pragma unroll
        for (int k = 0; k < VEC; k += ABREAST) {
            if (!has(c, k)) continue;
            Elements e = elements_at<INVERSES || IN_SHARED>(in.layout, at.part[c], parameters, here, k, own.inverse_at(c, k));
            if (NEVER_EARLY && !inside) e.xhat = each(A{0});
            const int count = has(c, k + ABREAST - 1) ? ABREAST : 1;
            add_to_columns(e, [&](int plane, int i) -> A& { return own.sum(plane, c, k + i); }, count);
            add_to_row(e, sums, count);
#if FROM_OUTPUT
            if (KEEP_XHAT) at.xhat[c][k] = e.xhat;
#endif
        }
    }
    return sums;
}

// Writes dx of a row, which begins at `dx`.
__device__ __forceinline__ void write_row(
    const Arrays& in, DATA_T* dx, const Place& place, int width, const Row& at, const Columns& own,
    const Statistics& of, const Pair<A>& means
) {
    dx += column_of(0, width);
    const DATA_T* ds = ADDED ? in.ds + start_of(in.layout, DS, place, width) + column_of(0, width) : nullptr;
#pragma unroll
    for (int c = 0; c < ALL_CHUNKS; ++c) {
        if (!is_inside(c, width)) continue;
        Parameters parameters = {scale_of(in.scale, own, c, width), {}};
        if (HAS_BIAS && !KEEP_XHAT) parameters.bias = bias_of(in.bias, own, c, width);
        const Raw<DATA_T, VEC> further = DS_EARLY ? at.ds[c] : fetch_chunk(c, ADDED, ds + chunk_offset(c, width));
        A out[VEC];
#pragma unroll
        for (int k = 0; k < VEC; k += ABREAST) {
            if (!has(c, k)) continue;
            Elements e = elements_at<INVERSES>(in.layout, at.part[c], parameters, of, k, own.inverse_at(c, k));
#if FROM_OUTPUT
            if (KEEP_XHAT) e.xhat = at.xhat[c][k];
#endif
            put_numbers(out, k, gradient(e, means, of.inv_std, numbers_at(further, k)));
        }
        store_chunk<PIECE>(c, dx + chunk_offset(c, width), out);
    }
}

#if ODD && !STRIDED
// Writes a row from shared memory: by packs of memory, each of which lies in two of the row's, and what lies in
// none one by one.
__device__ __forceinline__ void write_exchanged(const DATA_T* row, DATA_T* dx, int width, u32 lead) {
    Raw<DATA_T, VEC> before[CHUNKS], own[CHUNKS];
    const int begin = column_of(0, width);
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const DATA_T* from = row + begin + chunk_offset(c, width);
        const bool exists = column_of(c, width) < packed(width);
        before[c] = fetch_if<VEC>(exists, from - VEC, DATA_T{});
        own[c] = fetch_if<VEC>(exists, from, DATA_T{});
    }
    by_words<Raw<DATA_T, VEC>::WORDS>(VEC - lead, [&](auto whole) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) own[c] = across(whole, before[c], own[c], VEC - lead);
    });
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
        if (column_of(c, width) < packed(width))
            store<VEC>(dx + begin - lead + chunk_offset(c, width), own[c]);
    const int alone = column_of(CHUNKS, width), away = static_cast<int>(lead);
    const bool in_pack = alone >= VEC - away && alone < packed(width) - away;
    if (alone < width && !in_pack) dx[alone] = row[alone];
}
#endif

__device__ __forceinline__ void write_partials(A* partials, int width, Columns& own, A* tile) {
#pragma unroll
    for (int plane = 0; plane < PLANES; ++plane)
#pragma unroll
        for (int c = 0; c < ALL_CHUNKS; ++c) {
            A sums[VEC];
#pragma unroll
            for (int k = 0; k < VEC; ++k) sums[k] = has(c, k) ? own.sum(plane, c, k) : A{0};
            if (!LONG && blockDim.y > 1) merge_rows(sums, tile);
            if (threadIdx.y != 0 || !is_inside(c, width)) continue;
            const i64 row = partials_before(plane, gridDim.x) + blockIdx.x;
            store_chunk<ODD ? 1 : VEC>(c, partials + row * width + column_of(c, width), sums);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) layer_norm_grad(
    const DATA_T* dy, const DATA_T* source, const PARAM_T* scale, const PARAM_T* bias,
    const STAT_T* mean, const STAT_T* inv_std, DATA_T* dx, A* partials, i64 rows, int width
    FURTHER_PARAMETERS
) {
    FURTHER_VARIABLES
    __shared__ Pair<A> slots[2 * WARP];
#if LONG
    DYNAMIC_SHARED(A, tile);
#else
    __shared__ A tile[MERGED_THREADS * VEC];
#endif
    scale = of_sample(scale, width);
    const Arrays in = {dy, source, scale, bias, mean, inv_std, ds, layout};
    Columns own(tile);
    __shared__ Inverses inverses[IN_SHARED ? CHUNKS * THREADS : 1];
    own.shared = inverses + (IN_SHARED ? threadIdx.y * blockDim.x + threadIdx.x : 0);
#pragma unroll
    for (int c = 0; c < ALL_CHUNKS; ++c) {
#if LONG == 2
        own.shared_scale(c) = fetch_columns(scale, c, width, A{1});
#else
        if (KEEP_SCALE) own.scale[c] = fetch_columns(scale, c, width, A{1});
#endif
        if (KEEP_BIAS) own.bias[c] = fetch_columns(bias, c, width, A{0});
        if (INVERSES) invert(in.layout, scale_of(scale, own, c, width), own.inverse[c]);
        if (IN_SHARED) invert(in.layout, scale_of(scale, own, c, width), own.shared[c * THREADS].at);
    }
    clear(own);
    A share = {1};
    share /= width;  // once: a division takes as long as a row's sums
    const i64 step = static_cast<i64>(gridDim.x) * blockDim.y;
    const i64 end = (sample() + 1) * rows;
    i64 first = sample() * rows + static_cast<i64>(blockIdx.x) * blockDim.y;
    Row next;
    if (AHEAD) fetch_row(in, first + threadIdx.y, end, width, next);
    for (int turn = 0; first < end; first += step, ++turn) {
        // A LONG row has a block of its own. Single floats leave no register for a second index.
        const i64 row = LONG && VEC == 1 && sizeof(DATA_T) == 4 ? first : first + threadIdx.y;
        Row at;
        if (AHEAD) at = next;
        fetch_row(in, AHEAD ? row + step : row, end, width, AHEAD ? next : at);
        if (DS_EARLY && AHEAD) fetch_ds(in, row, end, width, at);
        const Statistics of = widen(at.of);
        const u32 lead = lead_of(row, width);
        if (ACROSS) move_own(at, lead);
        const Pair<A> sums = sum_row(in, of, width, own, at);
        if (LEFT && !dx) continue;
        Pair<A> means = row_sums<ODD>(sums, slots, turn);
        means.first = means.first * share;
        means.second = means.second * share;
        const Place place = place_of(in.layout, row);
        const bool wanted = row < end && (ADDED || LEFT || dx);
        DATA_T* to = dx + start_of(in.layout, DX, place, width);
#if ODD && !STRIDED
        // Read before the barrier of the next row's sums, or by the warp that wrote it.
        __shared__ Raw<DATA_T, VEC> exchanged[THREADS * CHUNKS + 3 * MERGED_THREADS / WARP];
        DATA_T* between = reinterpret_cast<DATA_T*>(exchanged + threadIdx.y * (blockDim.x * CHUNKS + 3));
        if (wanted) write_row(in, between, place, width, at, own, of, means);
        __syncthreads();
        if (wanted) write_exchanged(between, to, width, lead);
#else
        if (wanted) write_row(in, to, place, width, at, own, of, means);
#endif
    }
    if (partials) write_partials(partials, width, own, tile);
}
