// The gradient of group norm from saved statistics, for groups that fit into a block's shared memory: dy
// and x are read once.
//
//   xhat = (x - mean) * inv_std, w = dy * scale
//   dx = inv_std * (w - mean of w - xhat * mean of w * xhat), means over a group
//   partials[0] = sums of dy * xhat over each channel of a sample, partials[1] = of dy
//
// dy, x, dx: (groups, width, space) of DATA_T, C order; dx may be dy, or null if it is not wanted. A sample has `groups_of_sample`
// groups of `width` channels. mean, inv_std: groups of STAT_T. scale: the channels of a sample, of PARAM_T,
// or null (1). partials: (2, groups * width) of double, or null: then not computed. All outputs are written
// with =. Deterministic: fixed orders, no atomics. No size is 0.
//
// Macros: VEC elements are read and written at once in memory, RUN of them in one channel: width * space
// is a multiple of VEC, space one of RUN, and arrays are aligned for packs.
//
// Launch: blockDim = (threads per channel, channels at once), on the terms of `row_sums` and at most
// 512 threads; any gridDim.x. Dynamic shared memory: 2 * width * space elements of DATA_T.

#include "packs.cuh"
#include "rows.cuh"

typedef Wide<DATA_T>::type A;

// Accesses of each of dy and x whose loads are in flight at once; and, a multiple of that, those that are
// summed in the accumulation dtype before they go to double.
constexpr int EACH_AT_ONCE = AT_ONCE / 2, STRETCH = 16;

// True if packs are of one channel each: then a thread reads and writes in memory what it adds up.
constexpr bool OWN_PACKS = RUN == VEC;

struct Channel {
    A mean, inv_std;
    __device__ __forceinline__ A xhat(DATA_T x) const { return (widen(x) - mean) * inv_std; }
};

__device__ __forceinline__ int own_thread() { return threadIdx.y * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int all_threads() { return blockDim.x * blockDim.y; }

// Copies a group between memory and shared memory, in either direction.
__device__ __forceinline__ void copy_group(const DATA_T* from, DATA_T* to, int packs) {
    for (int pack = own_thread(); pack < packs; pack += AT_ONCE * all_threads()) {
        Raw<DATA_T, VEC> read[AT_ONCE];
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) {
            const int at = pack + b * all_threads();
            read[b] = fetch_if<VEC>(at < packs, from + at * VEC, DATA_T{});
        }
#pragma unroll
        for (int b = 0; b < AT_ONCE; ++b) {
            const int at = pack + b * all_threads();
            if (at < packs) store<VEC>(to + static_cast<i64>(at) * VEC, read[b]);  // an int: NVRTC stores single words
        }
    }
}

// A thread's sums of dy * xhat and of dy over one channel, of so many accesses. What is read is held.
__device__ __forceinline__ Pair<double> share_of_channel(
    const DATA_T* dy, const DATA_T* x, DATA_T* held_dy, DATA_T* held_x, int accesses, const Channel& of
) {
    Pair<double> total = {0, 0};
    for (int first = threadIdx.x; first < accesses;) {
        Pair<A> part = {0, 0};
        for (int i = 0; i < STRETCH && first < accesses; i += EACH_AT_ONCE) {
            Raw<DATA_T, RUN> dys[EACH_AT_ONCE], xs[EACH_AT_ONCE];
#pragma unroll
            for (int b = 0; b < EACH_AT_ONCE; ++b) {
                const int at = first + b * blockDim.x;
                dys[b] = fetch_if<RUN>(at < accesses, dy + at * RUN, DATA_T{});
                xs[b] = fetch_if<RUN>(at < accesses, x + at * RUN, DATA_T{});
            }
#pragma unroll
            for (int b = 0; b < EACH_AT_ONCE; ++b) {
                const int at = first + b * blockDim.x;
                if (at >= accesses) continue;
                if (OWN_PACKS) {
                    store<RUN>(held_dy + at * RUN, dys[b]);
                    store<RUN>(held_x + at * RUN, xs[b]);
                }
#pragma unroll
                for (int k = 0; k < RUN; ++k) {
                    const A own = widen(dys[b].at(k));
                    part.first = fused(own, of.xhat(xs[b].at(k)), part.first);
                    part.second += own;
                }
            }
            first += EACH_AT_ONCE * blockDim.x;
        }
        total.first += exactly(part.first);
        total.second += exactly(part.second);
    }
    return total;
}

// Writes dx of a thread's share of one channel.
__device__ __forceinline__ void apply_to_channel(
    const DATA_T* dy, const DATA_T* x, DATA_T* dx, int accesses, const Channel& of, A scale,
    const Pair<A>& means
) {
    for (int at = threadIdx.x; at < accesses; at += blockDim.x) {
        const Raw<DATA_T, RUN> dys = fetch<RUN>(dy + at * RUN), xs = fetch<RUN>(x + at * RUN);
        A out[RUN];
#pragma unroll
        for (int k = 0; k < RUN; ++k) {
            const A rest = fused(of.xhat(xs.at(k)), means.first, means.second);
            out[k] = of.inv_std * (widen(dys.at(k)) * scale - rest);
        }
        store<RUN>(dx + at * RUN, out);
    }
}

// The sum over all threads of a block, which all must call it. `turn` as for `row_sums`.
__device__ __forceinline__ Pair<double> block_sums(Pair<double> value, Pair<double>* slots, int turn) {
    Pair<double>* own = slots + (turn & 1) * WARP;
    const int lane = own_thread() % WARP;
    value = warp_sums(value, WARP);
    if (lane == 0) own[own_thread() / WARP] = value;
    __syncthreads();
    return warp_sums(lane < all_threads() / WARP ? own[lane] : Pair<double>{0, 0}, WARP);
}

// Blocks of the most threads that registers suffice for.
constexpr int BLOCKS = sizeof(DATA_T) == 8 ? 1 : 2;

extern "C" __global__ void __launch_bounds__(512, BLOCKS) held_group_gradient(
    const DATA_T* dy, const DATA_T* x, const PARAM_T* scale, const STAT_T* mean, const STAT_T* inv_std,
    double* partials, DATA_T* dx, i64 groups, i64 groups_of_sample, int space, int width
) {
    __shared__ Pair<double> slots[2 * WARP], totals[2 * WARP];
    DYNAMIC_SHARED(DATA_T, held_dy);
    const int elements = width * space, accesses = space / RUN;
    DATA_T* held_x = held_dy + elements;
    int turn = 0, group_turn = 0;
    for (i64 group = blockIdx.x; group < groups; group += gridDim.x) {
        const i64 start = group * elements;
        const PARAM_T* own_scale = scale + (scale ? group % groups_of_sample * width : 0);
        const auto scale_of = [&](int channel) {
            return fetch_if<1>(scale && channel < width, own_scale + channel, narrow<PARAM_T>(A{1})).at(0);
        };
        const Channel of = {widen(mean[group]), widen(inv_std[group])};
        if (!OWN_PACKS) {
            copy_group(dy + start, held_dy, elements / VEC);
            copy_group(x + start, held_x, elements / VEC);
            __syncthreads();
        }
        const DATA_T* dys = OWN_PACKS ? dy + start : held_dy;
        const DATA_T* xs = OWN_PACKS ? x + start : held_x;
        Pair<double> weighted = {0, 0};
        for (int first = 0; first < width; first += blockDim.y) {  // for all threads alike
            const int channel = first + threadIdx.y, at = channel * space;
            const int own = channel < width ? accesses : 0;
            const PARAM_T factor = scale_of(channel);
            const Pair<double> share = share_of_channel(dys + at, xs + at, held_dy + at, held_x + at, own, of);
            const Pair<double> total = row_sums(share, slots, turn++);
            if (threadIdx.x != 0 || !own) continue;
            const double weight = to_double(factor);
            weighted.first = fused(weight, total.first, weighted.first);
            weighted.second = fused(weight, total.second, weighted.second);
            if (!partials) continue;
            partials[group * width + channel] = total.first;
            partials[(groups + group) * width + channel] = total.second;
        }
        if (!dx) {
            if (!OWN_PACKS) __syncthreads();  // another group may be copied there
            continue;
        }
        const Pair<double> total = block_sums(weighted, totals, group_turn++);
        const double count = elements;
        const Pair<A> means = {narrow<A>(total.first / count), narrow<A>(total.second / count)};
        DATA_T* out = OWN_PACKS ? dx + start : held_dy;
        for (int channel = threadIdx.y; channel < width; channel += blockDim.y) {
            const int at = channel * space;
            apply_to_channel(held_dy + at, held_x + at, out + at, accesses, of, widen(scale_of(channel)), means);
        }
        if (OWN_PACKS) continue;
        __syncthreads();
        copy_group(held_dy, dx + start, elements / VEC);
        __syncthreads();  // another group may be copied there
    }
}
