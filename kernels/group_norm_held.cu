// Group norm forward for groups that fit into a block's shared memory: x is read once.
//
//   y = (x - mean) * inv_std * scale + bias, with statistics of each sample's groups of channels
//
// x, y: (groups, width, space) of DATA_T, C order; y may be x. A sample has `groups_of_sample` groups
// of `width` channels. scale, bias: the channels of a sample, of PARAM_T, or null (1 and 0). mean,
// inv_std: groups of STAT_T. All outputs are written with =. Deterministic: fixed orders, no atomics. What
// is written of a group depends on that group alone, not on the grid. No size is 0.
//
// A thread has every blockDim.x-th pack of a group: it reads and holds them and finds their moments, then it
// writes y. f32 and narrower are summed in floats over a few packs, then in double; if a distance overflows, or
// a square does or loses digits, the thread sums again in double. The mean of finite f64 elements is finite.
//
// Macros: VEC elements are read and written at once: width * space is a multiple of VEC, and arrays
// are aligned for packs. RUN: VEC if space is a multiple of VEC, so that packs are of one channel each;
// else 1, and space > VEC.
//
// Launch: blockDim = (x, 1), x a multiple of 32 from 64 to 512; any gridDim.x. Dynamic shared memory:
// width * space elements of DATA_T.

#include "moments.cuh"
#include "packs.cuh"
#include "rows.cuh"

typedef Wide<DATA_T>::type A;

// Calls visit(b, the number of the pack) for a thread's packs from `first` on, up to AT_ONCE.
template <typename Visit> __device__ __forceinline__ void each_pack(int first, Visit visit) {
#pragma unroll
    for (int b = 0; b < AT_ONCE; ++b) visit(b, first + b * static_cast<int>(blockDim.x));
}

// Calls visit(first) for a thread's packs, AT_ONCE at a time.
template <typename Visit> __device__ __forceinline__ void each_stretch(int packs, Visit visit) {
    for (int first = threadIdx.x; first < packs; first += AT_ONCE * blockDim.x) visit(first);
}

// A thread's packs from `first` on, all loads in flight together; zeros for those that do not exist.
struct Packs {
    Raw<DATA_T, VEC> at[AT_ONCE];

    __device__ __forceinline__ Packs(const DATA_T* from, int first, int packs) {
        each_pack(first, [&](int b, int k) { at[b] = fetch_if<VEC>(k < packs, from + k * VEC, DATA_T{}); });
    }
};

typedef Reading<DATA_T, VEC, 1> Share;

// The moments of a thread's packs in double, one element at a time. Rare, so in little code.
__device__ __forceinline__ Moments held_in_double(const DATA_T* held, int packs) {
    Moments own = {};
#pragma unroll 1
    for (int pack = threadIdx.x; pack < packs; pack += blockDim.x)
#pragma unroll 1
        for (int k = 0; k < VEC; ++k) own += moments_of(to_double(held[pack * VEC + k]));
    return own;
}

// Holds a thread's packs of x, and returns their moments.
__device__ __forceinline__ Moments hold_share(const DATA_T* x, DATA_T* held, int packs) {
    Share share = {};
    int taken = 0;  // since a stretch began
    each_stretch(packs, [&](int first) {
        const Packs read(x, first, packs);
        if (first == threadIdx.x) share.begin(read.at[0]);
        each_pack(first, [&](int b, int at) {
            if (at >= packs) return;
            store<VEC>(held + at * VEC, read.at[b]);
            share.add(read.at[b]);
            ++taken;
        });
        const bool last = first + AT_ONCE * static_cast<int>(blockDim.x) >= packs;
        if (!last && share.count > 0 && taken < STRETCH) return;
        share.end_stretch(taken * VEC);
        taken = 0;
    });
    return share.exact_enough() ? share.of(0) : held_in_double(held, packs);
}

// The place of an element in its group.
struct Place {
    int channel, within;

    __device__ __forceinline__ Place(int element, int space) : channel(element / space), within(element % space) {}

    __device__ __forceinline__ void move(const Place& by, int space) {
        channel += by.channel;
        within += by.within;
        if (within < space) return;
        within -= space;
        ++channel;
    }
};

// Statistics of a thread's group. The mean in two parts: a single one is off by half a unit
// in the last place, which may be large compared with x - mean.
struct Group { A high, low, inv_std; };

// A parameter of the channels that a pack lies in, and how many of its elements are in the first.
constexpr int CHANNELS = RUN == VEC ? 1 : 2;
struct Parameter {
    PARAM_T of[CHANNELS];

    __device__ __forceinline__ A at(bool next) const { return widen(next ? of[CHANNELS - 1] : of[0]); }
};

__device__ __forceinline__ void normalize_pack(
    const Raw<DATA_T, VEC>& x, const Group& of, const Parameter& scale, const Parameter& bias, int border,
    DATA_T* y
) {
    A values[VEC];
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
        const A xhat = (widen(x.at(k)) - of.high - of.low) * of.inv_std;
        values[k] = fused(xhat, scale.at(k >= border), bias.at(k >= border));
    }
    store<VEC>(y, values);
}

// Writes a thread's packs of y.
__device__ __forceinline__ void normalize_share(
    const DATA_T* held, const PARAM_T* scale, const PARAM_T* bias, DATA_T* y, int packs, int space,
    int width, const Group& of, Place place, const Place& step
) {
    each_stretch(packs, [&](int first) {
        Parameter scales[AT_ONCE], biases[AT_ONCE];
        int border[AT_ONCE];
        each_pack(first, [&](int b, int) {
#pragma unroll
            for (int next = 0; next < CHANNELS; ++next) {
                const int channel = place.channel + next;
                const auto load = [&](const PARAM_T* from, A absent) {
                    return fetch_if<1>(from && channel < width, from + channel, narrow<PARAM_T>(absent)).at(0);
                };
                scales[b].of[next] = load(scale, A{1});
                biases[b].of[next] = load(bias, A{0});
            }
            border[b] = space - place.within;
            place.move(step, space);
        });
        each_pack(first, [&](int b, int at) {
            if (at >= packs) return;
            const Raw<DATA_T, VEC> x = fetch<VEC>(held + at * VEC);
            DATA_T* const to = y + static_cast<i64>(at) * VEC;  // of an int, NVRTC stores single words
            normalize_pack(x, of, scales[b], biases[b], border[b], to);
        });
    });
}

// The moments of warps, in the slots of the first turn of `row_sums`, and what they give. The barrier after
// each group's use of one separates it from the next group's use of the other.
struct Slots {
    Moments of[WARP];
    double mean, low, inv_std;
};

// Registers for as many threads as a multiprocessor needs to keep memory busy.
extern "C" __global__ void __launch_bounds__(512, 2) held_group_norm(
    const DATA_T* x, const PARAM_T* scale, const PARAM_T* bias, DATA_T* y, STAT_T* mean, STAT_T* inv_std,
    i64 groups, i64 groups_of_sample, int space, int width, double eps
) {
    __shared__ Slots slots;
    DYNAMIC_SHARED(DATA_T, held);
    const int elements = width * space, packs = elements / VEC;
    const Place own(threadIdx.x * VEC, space), step(blockDim.x * VEC, space);
    for (i64 group = blockIdx.x; group < groups; group += gridDim.x) {
        const i64 start = group * elements;
        // No memory holds 2^32 groups of such sizes, and dividing 64 bits takes long.
        const u32 channel = static_cast<u32>(group) % static_cast<u32>(groups_of_sample) * width;
        const Moments all = row_sums(hold_share(x + start, held, packs), slots.of, 0);
        if (threadIdx.x == 0) {  // alone: many GPUs have few units for doubles
            slots.mean = all.mean;
            slots.low = all.low;
            slots.inv_std = 1 / sqrt(all.variance() + eps);
            mean[group] = narrow<STAT_T>(all.mean + all.low);
            inv_std[group] = narrow<STAT_T>(slots.inv_std);
        }
        __syncthreads();
        const A high = narrow<A>(slots.mean), low = narrow<A>(slots.mean - exactly(high) + slots.low);
        const Group of = {high, low, narrow<A>(slots.inv_std)};
        normalize_share(
            held, scale ? scale + channel : nullptr, bias ? bias + channel : nullptr, y + start, packs, space,
            width, of, own, step
        );
    }
}
