// Sums of deviations from a centre and of their squares, over a thread's share of its channels.

#pragma once

#include "channels.cuh"

// Packs, a multiple of AT_ONCE, that are summed in the accumulation dtype before they go to double.
#define STRETCH (LAST ? 16 : AT_ONCE)

// A thread's sums for its channels of x - centre and of its square; `apart` has a bit set if an
// element is not the centre.
struct Sums {
    double of[2][OWN];
    u32 apart[OWN];
};

// Adds the elements of one pack.
__device__ __forceinline__ void add_pack(
    const Raw<DATA_T, VEC>& x, const A (&centre)[OWN], A (&part)[2][OWN], Sums& sums
) {
    A own[2][OWN];
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
        const A deviation = widen(x.at(k)) - centre[k % OWN];
        sums.apart[k % OWN] |= __float_as_uint(narrow<f32>(deviation)) & 0x7fffffffu;
        A (&sum)[OWN] = own[0], (&squares)[OWN] = own[1];
        sum[k % OWN] = k < OWN ? deviation : sum[k % OWN] + deviation;
        squares[k % OWN] = k < OWN ? deviation * deviation : fused(deviation, deviation, squares[k % OWN]);
    }
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        part[0][k] += own[0][k];
        part[1][k] += own[1][k];
    }
}

// The sums about `centre`; with `about_first` about the thread's first element of each channel,
// which then goes to `centre`. Returns the number of packs.
__device__ __forceinline__ i64 sum_share(
    const DATA_T* x, const Shape& shape, i64 channel, bool about_first, A (&centre)[OWN], Sums& sums
) {
    i64 count = 0;
    for (Walk walk(shape); walk.inside(shape);) {
        A part[2][OWN];
        fill<OWN>(part[0], A{0});
        fill<OWN>(part[1], A{0});
        for (int i = 0; i < STRETCH && walk.inside(shape); i += AT_ONCE) {
            const Places places(walk, shape, channel);
            const Packs packs = fetch_packs(x, places);
#pragma unroll
            for (int k = 0; k < OWN; ++k)
                if (about_first && count == 0) centre[k] = widen(packs.at[0].at(k));
#pragma unroll
            for (int b = 0; b < AT_ONCE; ++b)
                if (b < places.count) add_pack(packs.at[b], centre, part, sums);
            count += places.count;
        }
#pragma unroll
        for (int k = 0; k < OWN; ++k) {
            sums.of[0][k] += exactly(part[0][k]);
            sums.of[1][k] += exactly(part[1][k]);
        }
    }
    return count;
}

// The same sums in double, with `about_first` about 0; of float64 elements, the second sum is then
// that of SHRUNK times the distance from `origin`. Rare, so in little code.
__device__ __forceinline__ void sum_share_in_double(
    const DATA_T* x, const Shape& shape, i64 channel, bool about_first, const double (&origin)[OWN],
    A (&centre)[OWN], Sums& sums
) {
    if (about_first) fill<OWN>(centre, A{0});
    fill<OWN>(sums.of[0], 0.0);
    fill<OWN>(sums.of[1], 0.0);
#pragma unroll 1
    for (Walk walk(shape); walk.inside(shape); walk.next()) {
        const Raw<DATA_T, VEC> values = fetch<VEC>(x + walk.index(shape, channel));
#pragma unroll
        for (int k = 0; k < VEC; ++k) {
            const double deviation = to_double(values.at(k)) - exactly(centre[k % OWN]);
            sums.of[0][k % OWN] += deviation;
            double& second = sums.of[1][k % OWN];
            if (sizeof(DATA_T) == 8 && about_first)
                second += shrunk(deviation) - shrunk(origin[k % OWN]);
            else
                second = fused(deviation, deviation, second);
        }
    }
}

// True if sums about a centre lost nothing that counts, and no distance overflowed.
__device__ __forceinline__ bool exact_enough(const Sums& sums) {
    bool exact = true;
#pragma unroll
    for (int k = 0; k < OWN; ++k) {
        const bool squares = sizeof(DATA_T) == 8 || sums.apart[k] == 0 || squares_held(sums.of[1][k]);
        exact = exact && squares && fabs(sums.of[0][k]) <= LARGEST;
    }
    return exact;
}

// Writes the partial sums of every column: about the centre, or if that is null, of x alone and, of
// float64 elements, of (x - x0) * SHRUNK, where x0 is the first element of the channel or group.
template <typename Columns>
__device__ __forceinline__ void sum_columns(
    const DATA_T* x, const double* centre, double* partials, const Columns& of, double* tile
) {
    // The condition is the same for the whole block, so all its threads reach the barriers.
    const i64 ahead = channel_in_block(of.run());
    for (i64 column = first_channel(of.run()); column - ahead < of.columns(); column += channel_step()) {
        Sums sums = {};
        Real<double> known[OWN];
        A about[OWN];
        double origin[OWN] = {};
        load_statistic(centre, column, of, Real<double>{0}, known);
#pragma unroll
        for (int k = 0; k < OWN; ++k) about[k] = narrow<A>(known[k]);
        if (column < of.columns()) {
            const Place at = place_of(of, column);
            const DATA_T* from = x + at.start;
            const bool origins = sizeof(DATA_T) == 8 && !centre;
            const i64 packs = sum_share(from, at.shape, at.channel, !centre, about, sums);
#pragma unroll
            for (int k = 0; k < OWN; ++k)
                if (origins) origin[k] = to_double(x[origin_of(of, column + k)]);
            const bool held = exact_enough(sums);
            if (!held) sum_share_in_double(from, at.shape, at.channel, !centre, origin, about, sums);
            const double count = centre ? 0 : static_cast<double>(packs * (VEC / OWN));
#pragma unroll
            for (int k = 0; k < OWN; ++k) {
                const double first = exactly(about[k]), distances = sums.of[0][k];
                sums.of[0][k] = fused(count, first, distances);
                if (!origins || !held) continue;
                const double apart = shrunk(first) - shrunk(origin[k]);
                sums.of[1][k] = fused(count, apart, shrunk(distances));
            }
        }
        write_sums(sums.of, column, of.columns(), of.run(), partials, tile);
    }
}
