// Warp operations and integer atomics: typed fronts of the runtime's untyped calls.
// Overloads rather than templates, so that exactly CUDA's types are accepted.
#pragma once

#define __syncwarp(...) emu_sync_warp(__VA_ARGS__)
static __forceinline__ void emu_sync_warp(unsigned mask = 0xffffffffu) {
  emu_warp(EMU_SYNC_WARP, mask, 0, 0, 32);
}
static __forceinline__ unsigned __ballot_sync(unsigned mask, int predicate) {
  return (unsigned)emu_warp(EMU_BALLOT, mask, predicate != 0, 0, 32);
}
static __forceinline__ int __any_sync(unsigned mask, int predicate) {
  return emu_warp(EMU_BALLOT, mask, predicate != 0, 0, 32) != 0;
}
static __forceinline__ int __all_sync(unsigned mask, int predicate) {
  return emu_warp(EMU_BALLOT, mask, predicate == 0, 0, 32) == 0;
}

template <class T>
static __forceinline__ T emu_shuffle(EmuWarpOp op, unsigned mask, T value, int operand,
                                     int width) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  unsigned long long raw = 0;
  __builtin_memcpy(&raw, &value, sizeof value);
  raw = emu_warp(op, mask, raw, operand, width);
  __builtin_memcpy(&value, &raw, sizeof value);
  return value;
}
#define EMU_SHUFFLES(T) \
  static __forceinline__ T __shfl_sync(unsigned mask, T value, int lane, int width = 32) { \
    return emu_shuffle(EMU_SHUFFLE_INDEX, mask, value, lane, width); \
  } \
  static __forceinline__ T __shfl_up_sync(unsigned mask, T value, unsigned d, int width = 32) { \
    return emu_shuffle(EMU_SHUFFLE_UP, mask, value, (int)d, width); \
  } \
  static __forceinline__ T __shfl_down_sync(unsigned mask, T value, unsigned d, \
                                            int width = 32) { \
    return emu_shuffle(EMU_SHUFFLE_DOWN, mask, value, (int)d, width); \
  } \
  static __forceinline__ T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) { \
    return emu_shuffle(EMU_SHUFFLE_XOR, mask, value, bits, width); \
  }
EMU_SHUFFLES(int)
EMU_SHUFFLES(unsigned)
EMU_SHUFFLES(long)
EMU_SHUFFLES(unsigned long)
EMU_SHUFFLES(long long)
EMU_SHUFFLES(unsigned long long)
EMU_SHUFFLES(float)
EMU_SHUFFLES(double)

template <class T>
static __forceinline__ T emu_atomic_typed(EmuAtomicOp op, T* address, T value, T compare = 0) {
  return (T)emu_atomic(op, address, sizeof(T), (unsigned long long)value,
                       (unsigned long long)compare);
}
#define EMU_ATOMICS(T, sign) \
  static __forceinline__ T atomicAdd(T* p, T v) { \
    return emu_atomic_typed(EMU_ATOMIC_ADD, p, v); \
  } \
  static __forceinline__ T atomicMin(T* p, T v) { \
    return emu_atomic_typed(EMU_ATOMIC_MIN_##sign, p, v); \
  } \
  static __forceinline__ T atomicMax(T* p, T v) { \
    return emu_atomic_typed(EMU_ATOMIC_MAX_##sign, p, v); \
  } \
  static __forceinline__ T atomicExch(T* p, T v) { \
    return emu_atomic_typed(EMU_ATOMIC_EXCHANGE, p, v); \
  } \
  static __forceinline__ T atomicOr(T* p, T v) { \
    return emu_atomic_typed(EMU_ATOMIC_OR, p, v); \
  } \
  static __forceinline__ T atomicAnd(T* p, T v) { \
    return emu_atomic_typed(EMU_ATOMIC_AND, p, v); \
  } \
  static __forceinline__ T atomicCAS(T* p, T compare, T v) { \
    return emu_atomic_typed(EMU_ATOMIC_COMPARE_AND_SWAP, p, v, compare); \
  }
EMU_ATOMICS(int, SIGNED)
EMU_ATOMICS(unsigned, UNSIGNED)
EMU_ATOMICS(unsigned long long, UNSIGNED)
static __forceinline__ unsigned atomicInc(unsigned* p, unsigned last) {
  return emu_atomic_typed(EMU_ATOMIC_INC, p, last);
}
// Sums by floating-point atomics depend on the schedule: the project forbids them.
float atomicAdd(float*, float) = delete;
double atomicAdd(double*, double) = delete;
