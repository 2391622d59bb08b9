// Combines and writes the chunks' partial results of a norm, for -DORDER.

#pragma once

#include "norm_orders.cuh"

// The lane's Part; what waits in any lane goes to lane 0. All lanes of a warp must call it.
__device__ __forceinline__ Part part_of(Share share) {
    if (!ORDER::WAITS) return share.part;
    for (int offset = WARP / 2; offset > 0; offset /= 2) {
        const float hi = __shfl_xor_sync(ALL_LANES, share.waiting.hi, offset);
        const float lo = __shfl_xor_sync(ALL_LANES, share.waiting.lo, offset);
        share.waiting = normalized(share.waiting + Single{hi, lo});
    }
    if (lane() == 0) add_waiting(share);
    return share.part;
}

// Lane 0 gets the Part of the first `lanes` lanes, a power of two of them. All lanes must call it.
__device__ __forceinline__ Part warp_part(Part part, double p, u32 lanes = WARP) {
    if (ORDER::WAITS && !__any_sync(ALL_LANES, lane() != 0 && part.hi != 0)) return part;  // the others add nothing
#pragma unroll 1
    for (u32 offset = lanes / 2; offset > 0; offset /= 2) {
        Part other;
        other.hi = __shfl_xor_sync(ALL_LANES, part.hi, offset);
        other.lo = __shfl_xor_sync(ALL_LANES, part.lo, offset);
        other.scale = __shfl_xor_sync(ALL_LANES, part.scale, offset);
        ORDER::combine(part, other, p);
    }
    return part;
}

// Thread 0 gets the block's Part. blockDim.x is a power of two. All threads must call it.
__device__ __forceinline__ Part block_part(Part part, double p) {
    __shared__ Part shared[WARP];
    part = warp_part(part, p);
    __syncthreads();  // `shared` may still be read by the call before
    if (lane() == 0) shared[threadIdx.x / WARP] = part;
    __syncthreads();
    if (threadIdx.x >= WARP) return part;
    const Part own = lane() < blockDim.x / WARP ? shared[lane()] : Part{0, 0, 0};
    return warp_part(own, p, blockDim.x / WARP);
}

// Writes a Part for each chunk or, if `joined`, for the chunks that a block takes at once.
// `part_of_chunk(chunk)` is called by a whole warp.
template <typename F>
__device__ __forceinline__ void write_parts(const TensorList& list, double p, Part* partials, bool joined, F part_of_chunk) {
    const u32 warps = blockDim.x / WARP, own = threadIdx.x / WARP;
    for (u32 first = blockIdx.x * warps; first < list.chunks; first += warps_in_grid()) {
        Part part = {0, 0, 0};
        if (first + own < list.chunks) part = part_of_chunk(first + own);
        // Narrow zeros' scale of 1 is not to hide a small f64. Bits are compared for want of double units.
        if (__double_as_longlong(part.hi) == 0) part.scale = 0;
        if (joined) {
            part = block_part(part, p);
            if (threadIdx.x == 0) partials[first / warps] = part;
        } else {
            part = warp_part(part, p);
            if (lane() == 0 && first + own < list.chunks) partials[first + own] = part;
        }
    }
}

// Combines a thread's share of the partials begin, begin + apart, ... before `end`: every blockDim.x-th,
// which it loads BATCH at a time.
__device__ __forceinline__ Part own_share(const Part* partials, u32 begin, u32 end, double p, u32 apart = 1) {
    constexpr u32 BATCH = ORDER::BATCH;
    const u32 step = blockDim.x * apart;
    Part sum = {0, 0, 0};
    for (u32 i = begin + threadIdx.x * apart; i < end; i += BATCH * step) {
        Part next[BATCH];
#pragma unroll
        for (u32 b = 0; b < BATCH; ++b) next[b] = i + b * step < end ? partials[i + b * step] : Part{0, 0, 0};
#pragma unroll
        for (u32 b = 0; b < BATCH; ++b) ORDER::combine(sum, next[b], p);
    }
    return sum;
}

// Writes a norm times `by` and whether it is of finite elements. `out` need not be aligned.
__device__ __forceinline__ void write_joined_norm(const Part& all, double p, double by, unsigned char* out, double* found_inf) {
    write<1>(reinterpret_cast<f64*>(out), Raw<f64, 1>{{norm_of<ORDER>(all, p, by)}});
    if (found_inf) *found_inf = fabs(all.hi) <= LARGEST ? 0 : 1;  // no sum overflows
}
