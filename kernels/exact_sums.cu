// Exact sums of |x| or x * x of each tensor of a list: the same for any order, cuts, launches or devices.
//
//   exact_partials: partials = a Sum per chunk, of squares if p is 2
//   exact_finish:   sums = 23 doubles per tensor: whole numbers below 2^32, the digits of the sum as a
//                   whole number of 2^-320, least significant first, and the sum of what is not finite:
//                   0, infinity or NaN
//
// One list may mix f16, bf16 and f32. Everything is computed in integers: a term has at most 48 bits,
// and each lane of a warp adds it to two or three of its own totals in shared memory. Every result is
// written with =. `kernels/cpu/exact_sums.h` has the same digits.
//
// Launch: exact_partials with a warp per chunk and at most 256 threads, exact_finish with a block per
// tensor; any grid, blockDim.x a multiple of 32.

#include "list_walk.cuh"

#define DIGITS 22
#define LEAST_BIT (-320)
#define MOST_WARPS 8

// The digits, which may be above 2^32; then how many terms are infinite, and NaN 2^32 times.
struct Sum { u64 at[DIGITS + 1]; };

typedef u64 Totals[DIGITS][WARP];  // of each lane: no two use a bank at once

struct AddExactly : ReadsSource {
    u64* own;  // the lane's totals, WARP apart
    double p;
    u64 beyond;
    __device__ AddExactly(Totals& totals, double p) : own(&totals[0][lane()]), p(p), beyond(0) {}
    template <typename T, int N>
    __device__ __forceinline__ void finish(const Held<T, T, N>& held, const T*, T*) {
#pragma unroll
        for (int i = 0; i < N; ++i) add(held.source.at(i));
    }
    __device__ void add(f64) { __trap(); }  // its squares are not exact
    template <typename T> __device__ __forceinline__ void add(T x) {
        const u32 magnitude = __float_as_uint(widen(x).value) & 0x7fffffffu;
        const u32 exponent = magnitude >> 23;
        if (exponent == 255) {
            beyond += magnitude > 0x7f800000u ? 1ull << 32 : 1;
            return;
        }
        // The magnitude is `mantissa` times 2^(place - 150).
        const u64 mantissa = exponent ? (magnitude & 0x7fffffu) | 0x800000u : magnitude;
        const int place = exponent ? static_cast<int>(exponent) : 1;
        if (p == 2) deposit(mantissa * mantissa, 2 * (place - 150) - LEAST_BIT);
        else deposit(mantissa, place - 150 - LEAST_BIT);
    }
    __device__ __forceinline__ void deposit(u64 value, u32 bit) {
        const u32 shift = bit % 32;
        const u64 low = (value & 0xffffffffu) << shift;
        const u64 high = ((value >> 32) << shift) + (low >> 32);
        u64* at = own + bit / 32 * WARP;
        at[0] += low & 0xffffffffu;
        at[WARP] += high & 0xffffffffu;
        if (high >> 32) at[2 * WARP] += high >> 32;
    }
};

// The lanes' sum: lane k adds up the k-th digit, and the one after the last what is not finite.
__device__ __forceinline__ u64 over_lanes(const Totals& totals, u64 beyond) {
    u64 all = 0;
    for (int offset = WARP / 2; offset > 0; offset /= 2) beyond += __shfl_xor_sync(ALL_LANES, beyond, offset);
    if (lane() == DIGITS) return beyond;
    if (lane() > DIGITS) return 0;
    for (int j = 0; j < WARP; ++j) all += totals[lane()][(lane() + j) % WARP];
    return all;
}

extern "C" __global__ void __launch_bounds__(256, 2)
exact_partials(const __grid_constant__ TensorList list, double p, Sum* partials) {
    __shared__ Totals shared[MOST_WARPS];
    Totals& totals = shared[threadIdx.x / WARP];
    for (u32 chunk = first_warp(); chunk < list.chunks; chunk += warps_in_grid()) {
        for (int k = 0; k < DIGITS; ++k) totals[k][lane()] = 0;
        AddExactly op(totals, p);
        walk(list, chunk, op);
        __syncwarp();
        const u64 all = over_lanes(totals, op.beyond);
        if (lane() <= DIGITS) partials[chunk].at[lane()] = all;
        __syncwarp();  // the totals may still be read
    }
}

// Both halves of numbers are added up by themselves, so that no sum is above 2^64.
struct Halves { u64 low, high; };

__device__ __forceinline__ double beyond_of(const Halves& terms) {
    if (terms.high) return __longlong_as_double(0x7ff8000000000000);
    return __longlong_as_double(terms.low ? 0x7ff0000000000000 : 0);
}

extern "C" __global__ void __launch_bounds__(256)
exact_finish(const __grid_constant__ TensorList list, const Sum* partials, double* sums) {
    __shared__ Halves shared[MOST_WARPS][DIGITS + 1];
    const u32 warp = threadIdx.x / WARP, warps = blockDim.x / WARP;
    for (u32 k = blockIdx.x; k < list.tensors; k += gridDim.x) {
        const u32 end = k + 1 < list.tensors ? list.at[k + 1].first_chunk : list.chunks;
        if (lane() <= DIGITS) {
            Halves own = {0, 0};
            for (u32 i = list.at[k].first_chunk + warp; i < end; i += warps) {
                own.low += partials[i].at[lane()] & 0xffffffffu;
                own.high += partials[i].at[lane()] >> 32;
            }
            shared[warp][lane()] = own;
        }
        __syncthreads();
        if (threadIdx.x <= DIGITS)
            for (u32 w = 1; w < warps; ++w) {
                shared[0][threadIdx.x].low += shared[w][threadIdx.x].low;
                shared[0][threadIdx.x].high += shared[w][threadIdx.x].high;
            }
        __syncthreads();
        if (threadIdx.x == 0) {
            double* to = sums + (DIGITS + 1) * static_cast<u64>(k);
            u64 carried = 0;
            for (int d = 0; d < DIGITS; ++d) {
                const Halves& digit = shared[0][d];
                const u64 low = carried + digit.low;
                to[d] = static_cast<double>(low & 0xffffffffu);
                carried = (low >> 32) + digit.high;
            }
            to[DIGITS] = beyond_of(shared[0][DIGITS]);
        }
        __syncthreads();  // `shared` may still be read
    }
}
