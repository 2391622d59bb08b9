// The mean and the variance of elements, from sums of their distances from a centre.

#pragma once

#include "dtypes.cuh"

// Times this, as many float64 elements as memory holds add up without overflow.
#define SHRUNK 0x1p-64

// Never fused with a sum: the product may be subnormal, and then its rounding shows.
__device__ __forceinline__ double shrunk(double x) { return product_of(SHRUNK, x); }

// The mean of `count` elements from the sum of (x - origin) * SHRUNK.
__device__ __forceinline__ double mean_about(double origin, double total, i64 count) {
    const double mean = product_of(shrunk(origin) + total / count, 1 / SHRUNK);
    return fabs(total) <= LARGEST ? fmin(fmax(mean, -LARGEST), LARGEST) : mean;
}

// The correction of a centre by a mean distance from it: 0 if that is lost, since distances of float64
// elements may overflow although they and their mean are finite. Their variance is then infinite.
template <typename A>
__device__ __forceinline__ double correction_of(double distance, const double* centre) {
    const bool lost = sizeof(A) == 8 && !(fabs(distance) <= LARGEST) && fabs(*centre) <= LARGEST;
    return lost ? 0 : distance;
}

struct Statistics { double mean, inv_std; };

// From the mean distance from a centre, as corrected, and the mean square of distances.
__device__ __forceinline__ Statistics statistics_about(
    double centre, double distance, double square, double eps
) {
    const double variance = fused(-distance, distance, square);
    return {centre + distance, 1 / sqrt((variance < 0 ? 0 : variance) + eps)};
}
