// Moves the parameters of a list, and an optimiser's states of them, by a step of updates.cuh.
//
// Sources are gradients (dtype -DGRAD), which are only read, targets parameters (-DPARAM). The further
// arrays are what is kept (-DSTATE), which is written too. -DAT_RANDOM=1: behind them come counters,
// by which 16-bit parameters are rounded as random_rounding.cuh says. Computed in float, or in double for
// parameters in double, and rounded once.

#pragma once

#include "conversions.cuh"
#include "further_arrays.cuh"
#include "random_rounding.cuh"

typedef typename Wide<PARAM>::type Number;

template <typename N> __device__ __forceinline__ N as_number(double x) { return as<N>(Real<f64>{x}); }
template <typename F> __device__ __forceinline__ bool is_zero(Real<F> x) { return x.value == 0; }
template <typename F> __device__ __forceinline__ bool is_positive(Real<F> x) { return x.value > 0; }
__device__ __forceinline__ Real<f64> root_of(Real<f64> x) { return {__dsqrt_rn(x.value)}; }
__device__ __forceinline__ Real<f32> root_of(Real<f32> x) {
#ifdef GRADKIT_EMULATED
    return {sqrtf(x.value)};
#else
    Real<f32> y;
    asm("sqrt.rn.f32 %0, %1;" : "=f"(y.value) : "f"(x.value));
    return y;
#endif
}

#include "updates.cuh"

// STEP moves one element: step(param, grad, states...). ITEMS: the bytes of each state's elements, and 1
// for counters.
template <typename STEP, int STATES, int... ITEMS> struct Update : FurtherOp<ITEMS...> {
    typedef FurtherOp<ITEMS...> Base;
    static constexpr int WIDEST = sizeof(PARAM) > sizeof(GRAD) ? sizeof(PARAM) : sizeof(GRAD);
    // As many elements an access as of the widest array 16 bytes hold.
    static constexpr int BYTES = STATES && sizeof(STATE) > WIDEST ? Op::BYTES * WIDEST / sizeof(STATE) : Op::BYTES;
    // The loaded states of N elements.
    template <int N> struct Kept { Raw<STATE, N> of[STATES + 1]; };

    STEP rule;
    u64 key;
    __device__ Update(STEP rule, u64 key) : rule(rule), key(key) {}

    template <typename S, typename T, int N>
    __device__ __forceinline__ void fetch(Held<S, T, N>& held, const S* grad, const T* param) {
        held.source = load<N>(grad);
        held.target = load<N>(param);
    }
    template <int N, typename T> __device__ __forceinline__ Kept<N> kept_of(const T* param) const {
        Kept<N> kept = {};
        if constexpr (STATES > 0) kept.of[0] = load<N>(reinterpret_cast<const STATE*>(Base::template further_of<0>(param)));
        if constexpr (STATES > 1) kept.of[1] = load<N>(reinterpret_cast<const STATE*>(Base::template further_of<1>(param)));
        return kept;
    }
    template <typename S, typename T, int N>
    __device__ __forceinline__ void put(const Held<S, T, N>& held, Kept<N> kept, T* param) {
        Number params[N], states[STATES + 1][N];
#pragma unroll
        for (int i = 0; i < N; ++i) {
            params[i] = as<Number>(widen(held.target.at(i)));
#pragma unroll
            for (int s = 0; s < STATES; ++s) states[s][i] = as<Number>(widen(kept.of[s].at(i)));
            const Number grad = as<Number>(widen(held.source.at(i)));
            if constexpr (STATES == 0) rule.step(params[i], grad);
            else if constexpr (STATES == 1) rule.step(params[i], grad, states[0][i]);
            else rule.step(params[i], grad, states[0][i], states[1][i]);
        }
        write<N>(param, narrowed<T>(params, param));
        if constexpr (STATES > 0) keep<0, N>(states[0], param);
        if constexpr (STATES > 1) keep<1, N>(states[1], param);
    }
    template <typename S, typename T, int N>
    __device__ __forceinline__ void finish(const Held<S, T, N>& held, const S*, T* param) {
        put(held, kept_of<N>(param), param);
    }

private:
    template <int F, int N, typename T> __device__ __forceinline__ void keep(const Number (&state)[N], const T* param) const {
        write<N>(reinterpret_cast<STATE*>(Base::template further_of<F>(param)), narrow_all<STATE>(state));
    }
    template <typename T, int N> __device__ __forceinline__ Raw<T, N> narrowed(const Number (&params)[N], const T* param) const {
#if AT_RANDOM
        const u64 counter = Base::template further_of<STATES>(param);
        Raw<T, N> rounded;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const u64 bits = __double_as_longlong(exactly(params[i]));
            rounded.put(i, T{rounded_at_random<T>(bits, random_bits(key, counter + i))});
        }
        return rounded;
#else
        return narrow_all<T>(params);
#endif
    }
};

// All that a lane holds is completed before the first store.
template <typename S, typename T, int N, typename STEP, int STATES, int... ITEMS>
__device__ __forceinline__ void finish_all(
    Update<STEP, STATES, ITEMS...>& op, const Held<S, T, N> (&held)[Op::BATCH], const S*, T* target, int count
) {
    typename Update<STEP, STATES, ITEMS...>::template Kept<N> kept[Op::BATCH] = {};
#pragma unroll
    for (int b = 0; b < Op::BATCH; ++b)
        if (b < count) kept[b] = op.template kept_of<N>(target + b * WARP * N);
#pragma unroll
    for (int b = 0; b < Op::BATCH; ++b)
        if (b < count) op.put(held[b], kept[b], target + b * WARP * N);
}

template <typename O> __device__ __forceinline__ void update_all(const TensorList& list, O op) {
    for (u32 chunk = first_warp(); chunk < chunks_of<O>(list); chunk += warps_in_grid())
        walk_with_further<GRAD, PARAM>(list, chunk, op);
}

// The key of a seed that the host knows, or that lies in memory.
__device__ __forceinline__ u64 key_of(const u64* seed, u64 number) {
#if AT_RANDOM
    return mixed(seed ? load<1>(seed).at(0) : number);
#else
    return 0;
#endif
}
