// CUDA's vector types, with CUDA's alignments, and the loads and stores with a cache hint.
// A whole vector is read or written by one access: the build turns off the compiler's
// scalar replacement of aggregates, which would split it and hide a misalignment.
#pragma once

#define EMU_VECTORS(T, name) \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; }; \
  struct alignas(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)) name##4 { T x, y, z, w; }; \
  static inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
  static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTORS(short, short)
EMU_VECTORS(unsigned short, ushort)
EMU_VECTORS(int, int)
EMU_VECTORS(unsigned, uint)
EMU_VECTORS(float, float)
EMU_VECTORS(long long, longlong)
EMU_VECTORS(unsigned long long, ulonglong)
EMU_VECTORS(double, double)

#define EMU_LOAD(name) \
  template <class T> \
  static __forceinline__ T name(const T* p) { \
    return *p; \
  }
EMU_LOAD(__ldg)
EMU_LOAD(__ldca)
EMU_LOAD(__ldcg)
EMU_LOAD(__ldcs)
EMU_LOAD(__ldlu)
EMU_LOAD(__ldcv)

// The value's type follows from the pointer, as in CUDA's overloads.
template <class T>
struct EmuSame {
  using type = T;
};
#define EMU_STORE(name) \
  template <class T> \
  static __forceinline__ void name(T* p, typename EmuSame<T>::type value) { \
    *p = value; \
  }
EMU_STORE(__stwb)
EMU_STORE(__stcg)
EMU_STORE(__stcs)
EMU_STORE(__stwt)
