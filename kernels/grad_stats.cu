// Statistics of each tensor of a list: 2-norm, largest magnitude, mean, zeros, what is not finite.
//
//   stat_partials: partials = a Stats per chunk
//   stat_finish:   stats = 5 doubles per tensor, or parts = 10 doubles that they are computed from
//
// One list may mix f16, bf16, f32 and f64. Each tensor is read once. Norms have the bits of norm.cu
// with a norm per tensor. Sums of f32 and narrower elements are taken in pairs of floats over some
// accesses and the lanes of a warp, then in double with the errors of additions. Every result is
// written with =. Deterministic: as norm.cu.
//
// Launch: stat_partials with a warp per chunk, stat_finish with a block per tensor; any grid,
// blockDim.x a multiple of 32.

#define ORDER SumOfSquares
#include "list_walk.cuh"
#include "norm_parts.cuh"

// The sum of elements of any sign; a large f64 is scaled, as by Sum.
struct SumOfElements : Sum {
    template <typename T> __device__ static __forceinline__ double term(T x) { return to_double(x); }
    template <typename T> __device__ static __forceinline__ constexpr bool is_exact() { return true; }
    template <typename T, typename F> __device__ static __forceinline__ Compensated<F> single(F x) { return {x, {}}; }
};

#define LARGEST_SINGLE 0x71800000u  // the bits of 2^100: no sum of such that waits overflows

// Bits of magnitudes are in their order, NaN above infinity.
struct Tally { u64 largest, nonzero, nonfinite; };

struct Stats { Part squares, sum; Tally tally; };

struct Collect : ReadsSource {
    Share squares, sum;
    Tally tally;
    u32 largest;  // of what is narrower than f64
    __device__ Collect() : squares{}, sum{}, tally{}, largest(0) {}
    template <typename T, int N>
    __device__ __forceinline__ void finish(const Held<T, T, N>& held, const T*, T*) {
        const Held<T, T, N> one[1] = {held};
        include(one);
    }
    __device__ __forceinline__ void rest() {
        add_waiting(squares);
        add_waiting(sum);
    }
    template <typename T, int N, int B> __device__ __forceinline__ void include(const Held<T, T, N> (&packs)[B]) {
        SumOfSquares::include(squares, packs, 2);
        if constexpr (sizeof(T) == 8) {
#pragma unroll
            for (int b = 0; b < B; ++b)
#pragma unroll
                for (int i = 0; i < N; ++i) include_double(packs[b].source.at(i));
        } else {
            include_narrow(packs);
        }
    }
    __device__ __forceinline__ void include_double(double x) {
        const u64 magnitude = static_cast<u64>(__double_as_longlong(x)) & 0x7fffffffffffffffull;
        tally.largest = max(tally.largest, magnitude);
        tally.nonzero += magnitude != 0;
        tally.nonfinite += magnitude >= 0x7ff0000000000000ull;
        const double scale = fabs(x) > 0x1p900 ? 0x1p100 : 1;  // NaN: 1
        if (scale > sum.part.scale) {
            Sum::shrink(sum.part, sum.part.scale / scale, 1);
            sum.part.scale = scale;
        }
        add(sum.part, sum.part.scale > 1 ? x * 0x1p-100 : x);
    }
    template <typename T, int N, int B> __device__ __forceinline__ void include_narrow(const Held<T, T, N> (&packs)[B]) {
        u32 own = 0, nonzero = 0, nonfinite = 0;
#pragma unroll
        for (int b = 0; b < B; ++b)
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const u32 magnitude = __float_as_uint(widen(packs[b].source.at(i)).value) & 0x7fffffffu;
                own = max(own, magnitude);
                nonzero += magnitude != 0;
                nonfinite += magnitude >= 0x7f800000u;
            }
        largest = max(largest, own);
        tally.nonzero += nonzero;
        tally.nonfinite += nonfinite;
        sum.part.scale = 1;
        if (own > LARGEST_SINGLE) {
            sum.part.hi = __dadd_rn(sum.part.hi, sum_in_double<SumOfElements>(packs));
            return;
        }
        const Single more = sum_in_single<SumOfElements>(packs);
        sum.waiting = normalized(sum.waiting + more);
    }
};

// All that a lane holds is included at once; zeros add nothing.
template <typename T, int N>
__device__ __forceinline__ void finish_all(Collect& op, const Held<T, T, N> (&held)[Collect::BATCH], const T*, T*, int) {
    op.include(held);
}

__device__ __forceinline__ void combine(Tally& into, const Tally& other) {
    into.largest = max(into.largest, other.largest);
    into.nonzero += other.nonzero;
    into.nonfinite += other.nonfinite;
}

// The same sum, in hi if that has cancelled: `combine` takes a Part without hi for nothing.
__device__ __forceinline__ Part led(const Part& sum) { return sum.hi == 0 ? Part{sum.lo, 0, sum.scale} : sum; }

__device__ __forceinline__ void combine_sums(Part& into, const Part& other) {
    into = led(into);
    Sum::combine(into, led(other), 1);
}

__device__ __forceinline__ void combine(Stats& into, const Stats& other) {
    SumOfSquares::combine(into.squares, other.squares, 2);
    combine_sums(into.sum, other.sum);
    combine(into.tally, other.tally);
}

// Lane 0 gets the warp's. All lanes must call it.
__device__ __forceinline__ Stats warp_stats(Stats stats) {
    stats.squares = warp_part(stats.squares, 2);
    Part& sum = stats.sum;
    const bool all_at_once = __any_sync(ALL_LANES, lane() != 0 && (sum.hi != 0 || sum.lo != 0));
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const Tally& own = stats.tally;
        combine(stats.tally, Tally{__shfl_xor_sync(ALL_LANES, own.largest, offset),
                                   __shfl_xor_sync(ALL_LANES, own.nonzero, offset),
                                   __shfl_xor_sync(ALL_LANES, own.nonfinite, offset)});
        if (!all_at_once) continue;  // the others add nothing
        combine_sums(sum, Part{__shfl_xor_sync(ALL_LANES, sum.hi, offset),
                               __shfl_xor_sync(ALL_LANES, sum.lo, offset),
                               __shfl_xor_sync(ALL_LANES, sum.scale, offset)});
    }
    return stats;
}

// Thread 0 gets the block's. All threads must call it.
__device__ __forceinline__ Stats block_stats(Stats stats) {
    __shared__ Stats shared[WARP];
    stats = warp_stats(stats);
    __syncthreads();  // `shared` may still be read by the call before
    if (lane() == 0) shared[threadIdx.x / WARP] = stats;
    __syncthreads();
    if (threadIdx.x >= WARP) return stats;
    return warp_stats(lane() < blockDim.x / WARP ? shared[lane()] : Stats{});
}

extern "C" __global__ void __launch_bounds__(256, 2)
stat_partials(const __grid_constant__ TensorList list, Stats* partials) {
    for (u32 chunk = first_warp(); chunk < list.chunks; chunk += warps_in_grid()) {
        Collect op;
        walk(list, chunk, op);
        const u64 narrow = static_cast<u64>(__double_as_longlong(exactly_of_bits(op.largest)));
        Stats stats = {part_of(op.squares), part_of(op.sum), op.tally};
        stats.tally.largest = max(stats.tally.largest, narrow);
        // As norm_partials: zeros' scale of 1 is not to hide a small f64.
        if (__double_as_longlong(stats.squares.hi) == 0) stats.squares.scale = 0;
        stats = warp_stats(stats);
        if (lane() == 0) partials[chunk] = stats;
    }
}

__device__ __forceinline__ double* write_part(double* to, const Part& part) {
    to[0] = part.hi;
    to[1] = fabs(part.hi) <= LARGEST ? part.lo : 0;  // no sum of what is finite overflows
    to[2] = part.scale;
    return to + 3;
}

// Either of `stats` and `parts` is null. `parts`: squares and sum, each (hi, lo, scale), the largest
// magnitude, zeros, what is not finite, all elements.
extern "C" __global__ void __launch_bounds__(1024)
stat_finish(const __grid_constant__ TensorList list, const Stats* partials, double* stats, double* parts) {
    for (u32 k = blockIdx.x; k < list.tensors; k += gridDim.x) {
        const u32 end = k + 1 < list.tensors ? list.at[k + 1].first_chunk : list.chunks;
        Stats own = {};
        for (u32 i = list.at[k].first_chunk + threadIdx.x; i < end; i += blockDim.x) combine(own, partials[i]);
        const Stats all = block_stats(own);
        if (threadIdx.x != 0) continue;
        const double count = static_cast<double>(list.at[k].count);
        const double largest = __longlong_as_double(static_cast<i64>(all.tally.largest));
        double* to;
        if (parts) {
            to = write_part(write_part(parts + 10 * k, all.squares), all.sum);
            *to++ = largest;
        } else {
            to = stats + 5 * k;
            *to++ = norm_of<SumOfSquares>(all.squares, 2, 1);
            *to++ = largest;
            *to++ = count == 0 ? 0 : __ddiv_rn(total(all.sum), count) * all.sum.scale;
        }
        *to++ = static_cast<double>(list.at[k].count - static_cast<i64>(all.tally.nonzero));
        *to++ = static_cast<double>(all.tally.nonfinite);
        if (parts) *to = count;
    }
}
