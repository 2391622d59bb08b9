// Numbers of one accumulation type as those of another.

#pragma once

#include "dtypes.cuh"

template <typename A, typename B> __device__ __forceinline__ A as(B x) {
    if constexpr (sizeof(A) == sizeof(B)) return {x.value};
    else if constexpr (sizeof(A) == sizeof(f64)) return {exactly(x.value)};
    else return {rounded(x.value)};
}
