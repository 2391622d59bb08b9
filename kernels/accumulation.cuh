// The new elements of a gradient buffer: buffer + scale * grad, or grad.
//
// With a scale, results are computed as if in double: the product is rounded, then the sum, then
// the sum to the buffer's dtype. An unscaled sum of f32 and narrower is rounded once.

#pragma once

#include "tensor_list.cuh"
#include "products.cuh"

// A flag that is read from its array, or is the number if that is null.
__device__ __forceinline__ bool flag_of(const unsigned char* array, u32 flag) { return array ? *array : flag; }

// N elements of a buffer, or -0 if it is to be overwritten: what is added to that stays as it is.
template <int N, typename T> __device__ __forceinline__ Raw<T, N> load_unless(bool fresh, const T* from) {
    if (!fresh) return load<N>(from);
    Raw<T, N> nothing;
#pragma unroll
    for (int i = 0; i < N; ++i) nothing.put(i, narrow<T>(-0.0));
    return nothing;
}

// N elements that were read, or +0 in their place: no load waits for what decides.
template <int N, typename T> __device__ __forceinline__ Raw<T, N> none_if(bool none, Raw<T, N> raw) {
    const Raw<T, N> nothing = {};
#pragma unroll
    for (int i = 0; i < Raw<T, N>::WORDS; ++i) raw.word[i] = none ? nothing.word[i] : raw.word[i];
    return raw;
}

// If the types agree, every bit is kept.
template <typename S, typename T> struct Convert {
    __device__ static __forceinline__ T apply(S x) {
        if constexpr (sizeof(T) == 8) return to_double(x);
        else return narrow<T>(widen(x));
    }
};
template <typename T> struct Convert<T, T> {
    __device__ static __forceinline__ T apply(T x) { return x; }
};

template <typename S, typename T, int N>
__device__ __forceinline__ Raw<T, N> converted(const Held<S, T, N>& held) {
    Raw<T, N> result;
#pragma unroll
    for (int i = 0; i < N; ++i) result.put(i, Convert<S, T>::apply(held.source.at(i)));
    return result;
}

// Sums rounded once, without double precision, of which many GPUs have little.
template <typename S, typename T, int N>
__device__ __forceinline__ Raw<T, N> sum_of_floats(const Held<S, T, N>& held) {
    Real<f32> sums[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const Real<f32> buffer = widen(held.target.at(i)), grad = widen(held.source.at(i));
        if constexpr (sizeof(T) == 4) sums[i] = buffer + grad;
        else sums[i] = {to_odd(sum_with_error(buffer.value, grad.value))};
    }
    return narrow_all<T>(sums);
}

// Floats on both sides of buffer + grad * factor, and of what double makes of it.
template <typename T>
__device__ __forceinline__ void enclose_sum(
    Real<f32> buffer, Real<f32> grad, const Factor& by, Real<f32>& one, Real<f32>& other
) {
    if constexpr (sizeof(T) == 2) {
        // Errors below 2^-23 of the product and 2^-24 of the sum, and again for `one` and `other`.
        const Real<f32> product = fused(grad, {by.rest}, grad * Real<f32>{by.near}), sum = buffer + product;
        const Real<f32> sizes = {sum_of(magnitude_of(product.value), magnitude_of(sum.value))};
        const Real<f32> margin = sizes * Real<f32>{0x1p-22f};
        one = sum - margin;
        other = sum + margin;
    } else {
        // The product is within 2^-47 of itself, `excess` what it has too much. An error of 2^-53 of
        // the sum decides nothing unless `rest` is 2^-27 of it.
        const Real<f32> product = grad * Real<f32>{by.near}, minus = {negative_of(grad.value)};
        const Real<f32> excess = fused(minus, {by.rest}, fused(minus, {by.near}, product));
        const Single sum = sum_with_error(buffer.value, product.value);
        const Real<f32> rest = excess - Real<f32>{sum.lo};  // so that -0 stays -0
        const Real<f32> least = {product_of(magnitude_of(rest.value), 0x1p-22f)};
        const Real<f32> margin = fused({magnitude_of(product.value)}, Real<f32>{0x1p-44f}, least);
        one = Real<f32>{sum.hi} - (rest - margin);
        other = Real<f32>{sum.hi} - (rest + margin);
    }
}

// As `agree`, of sums: they may be subnormal, which == takes for zeros.
template <typename T> __device__ __forceinline__ bool same(T one, T other) { return agree(one, other); }
template <> __device__ __forceinline__ bool same(f32 one, f32 other) {
    return agree(one, other) && __float_as_uint(one) == __float_as_uint(other);
}

// N sums; a bit is set in the result for each that needs double.
template <typename S, typename T, int N>
__device__ __forceinline__ u32 add_in_single(const Held<S, T, N>& held, const Factor& by, Raw<T, N>& result) {
    Real<f32> one[N], other[N];
    u32 smallest = 0xffffffffu;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const Real<f32> grad = widen(held.source.at(i));
        smallest = min(smallest, less_one(grad));
        enclose_sum<T>(widen(held.target.at(i)), grad, by, one[i], other[i]);
    }
    result = narrow_all<T>(one);
    const Raw<T, N> upper = narrow_all<T>(other);
    const bool large = by.fits && smallest >= by.least - 1;
    u32 left = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) left |= static_cast<u32>(!large || !same(result.at(i), upper.at(i))) << i;
    return left;
}

struct Add : ReadsBoth {
    Factor scale;
    __device__ explicit Add(double scale) : scale(scale) {}
    template <typename S, typename T, int N>
    __device__ __forceinline__ void finish(const Held<S, T, N>& held, const S*, T* buffer) {
        write<N>(buffer, result_of(held));
    }
    template <typename S, typename T, int N>
    __device__ __forceinline__ Raw<T, N> result_of(const Held<S, T, N>& held) const {
        Raw<T, N> result;
        u32 left = (1u << N) - 1;
        if constexpr (sizeof(S) < 8 && sizeof(T) < 8) {
            if (scale.exact == 1) return sum_of_floats(held);
            left = add_in_single(held, scale, result);
        }
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if (!(left >> i & 1)) continue;
            const double term = __dmul_rn(to_double(held.source.at(i)), scale.exact);
            result.put(i, narrow<T>(__dadd_rn(to_double(held.target.at(i)), term)));
        }
        return result;
    }
};

struct Overwrite : ReadsSource {
    template <typename S, typename T, int N>
    __device__ __forceinline__ void finish(const Held<S, T, N>& held, const S*, T* buffer) {
        write<N>(buffer, converted(held));
    }
};
