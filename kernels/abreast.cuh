// Arithmetic on ABREAST elements of a pack at once: on two floats if one instruction computes both.
//
// Each element is computed as if it were alone, so results do not depend on ABREAST. Macros: DATA_T, VEC.

#pragma once

#include "packs.cuh"

typedef Wide<DATA_T>::type A;

// One number of each of the elements that are computed together.
template <bool TWO> struct AbreastOf {
    typedef A type;
    __device__ static __forceinline__ A join(A first, A) { return first; }
    __device__ static __forceinline__ A part(A x, int) { return x; }
};
template <> struct AbreastOf<true> {
    typedef Real<Two> type;
    template <typename F> __device__ static __forceinline__ type join(Real<F> first, Real<F> second) {
        return {{first.value, second.value}};
    }
    __device__ static __forceinline__ Real<float> part(type x, int i) { return {i ? x.value.second : x.value.first}; }
};

constexpr int ABREAST = TWO_AT_ONCE && VEC > 1 && sizeof(A) == 4 ? 2 : 1;
typedef AbreastOf<ABREAST == 2> Abreast;
typedef Abreast::type Numbers;

// The same number for each.
__device__ __forceinline__ Numbers each(A x) { return Abreast::join(x, x); }

// The numbers of a pack's elements from the k-th on. Taken before it is needed, one would occupy a register.
template <typename T> __device__ __forceinline__ Numbers numbers_at(const Raw<T, VEC>& pack, int k) {
    if constexpr (ABREAST == 1) return widen(pack.at(k));
    else return Abreast::join(widen(pack.at(k)), widen(pack.at(k + 1)));
}
__device__ __forceinline__ Numbers numbers_at(const A (&pack)[VEC], int k) {
    return Abreast::join(pack[k], pack[(k + 1) % VEC]);
}

__device__ __forceinline__ void put_numbers(A (&pack)[VEC], int k, Numbers x) {
#pragma unroll
    for (int i = 0; i < ABREAST; ++i) pack[k + i] = Abreast::part(x, i);
}
