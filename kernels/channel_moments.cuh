// The moments of a thread's share of its channels, from one reading.

#pragma once

#include "channels.cuh"
#include "moments.cuh"

typedef Reading<DATA_T, VEC, OWN> Share;

// Begins with what is read first: a pack of a channel, or an element of each of some packs.
__device__ __forceinline__ void begin(const Packs& packs, int count, Share& share) {
    if constexpr (OWN == 1) {
        share.begin(packs.at[0]);
    } else {
        A distances[OWN] = {};
#pragma unroll
        for (int k = 0; k < OWN; ++k)
#pragma unroll
            for (int b = 1; b < AT_ONCE; ++b)
                if (b < count) distances[k] += widen(packs.at[b].at(k)) - widen(packs.at[0].at(k));
        share.begin(packs.at[0], distances, count);
    }
}

__device__ __forceinline__ void read_share(const DATA_T* x, const Shape& shape, i64 channel, Share& share) {
    for (Walk walk(shape); walk.inside(shape);) {
        int taken = 0;
        const int most = share.count == 0 ? AT_ONCE : STRETCH;
        for (int i = 0; i < most && walk.inside(shape); i += AT_ONCE) {
            const Places places(walk, shape, channel);
            const Packs packs = fetch_packs(x, places);
            if (share.count == 0 && taken == 0) begin(packs, places.count, share);
#pragma unroll
            for (int b = 0; b < AT_ONCE; ++b)
                if (b < places.count) share.add(packs.at[b]);
            taken += places.count;
        }
        share.end_stretch(taken * (VEC / OWN));
    }
}

// The same in double, one channel and one element at a time. Rare, so in little code.
__device__ __forceinline__ void read_in_double(
    const DATA_T* x, const Shape& shape, i64 channel, Moments (&own)[OWN]
) {
#pragma unroll 1
    for (int k = 0; k < OWN; ++k) {
        Moments one = {};
#pragma unroll 1
        for (Walk walk(shape); walk.inside(shape); walk.next()) {
            const DATA_T* const pack = x + walk.index(shape, channel);
#pragma unroll 1
            for (int i = k; i < VEC; i += OWN) one += moments_of(to_double(pack[i]));
        }
#pragma unroll
        for (int i = 0; i < OWN; ++i) own[i] = i == k ? one : own[i];
    }
}

// Writes the moments of every column's elements in the block.
template <typename Columns>
__device__ __forceinline__ void write_moments(
    const DATA_T* x, Moments* parts, const Columns& of, Moments* tile
) {
    // The condition is the same for the whole block, so all its threads reach the barriers.
    const i64 ahead = channel_in_block(of.run());
    for (i64 column = first_channel(of.run()); column - ahead < of.columns(); column += channel_step()) {
        Moments own[OWN] = {};
        if (column < of.columns()) {
            const Place at = place_of(of, column);
            Share share = {};
            read_share(x + at.start, at.shape, at.channel, share);
            if (share.exact_enough()) {
#pragma unroll
                for (int k = 0; k < OWN; ++k) own[k] = share.of(k);
            } else {
                read_in_double(x + at.start, at.shape, at.channel, own);
            }
        }
        write_parts(own, column, of.columns(), of.run(), parts, tile);
    }
}
