// Loads, stores and atomics: each goes through the emulator's runtime, which checks it.
//
// Generic addresses are the host's. Those in shared memory count from the block's first byte; those
// of another block of the cluster, or mapped to its own, from a multiple of 2^20 by its rank and one.
// Addresses of parameters count from the first byte of the launch's.
#pragma once

#include "abi.h"
#include "bits.h"

// The runtime's numbers of these faults (runtime/fault.h).
enum Fault { out_of_bounds = 1, misaligned = 2, endless = 10, early = 14 };
enum Access { nothing, reading = 1, writing = 2 };
OP void __attribute__((noreturn)) stop(Fault kind, Access access, u64 address, u64 size) {
  emu_stop(kind, access, address, size);
  __builtin_unreachable();
}

#define CHECKS(n) \
  EMU_API void __tsan_read##n(void*); \
  EMU_API void __tsan_write##n(void*);
CHECKS(1) CHECKS(2) CHECKS(4) CHECKS(8) CHECKS(16)
#undef CHECKS

static const u64 shared_bytes = 1 << 20;  // more than any block has
OP u64 shared_base() { return (u64)emu_dynamic_shared(); }
OP u64 cluster_base() { return shared_base() - emu_cluster_rank() * shared_bytes; }
static const unsigned most_blocks = 8;  // of a cluster

// The generic address of one in shared memory, and the other way round.
OP u64 shared_address(u64 address) {
  return address < shared_bytes ? shared_base() + address : cluster_base() + (address - shared_bytes);
}
OP u64 shared_offset(u64 address) {
  if (address - shared_base() < shared_bytes) return address - shared_base();
  return address - cluster_base() + shared_bytes;
}
// Either for the same place in another block; beyond all of them if there is no such block.
OP u64 mapped(u64 address, u32 rank) { return (u64)emu_map_shared((const void*)address, rank); }
OP u64 mapped_shared(u64 address, u32 rank) {
  return (1 + (rank < most_blocks ? rank : most_blocks)) * shared_bytes + address % shared_bytes;
}

template <int Size> OP void check(u64 address, bool write) {
  if constexpr (Size == 32) {
    if (address % 32) stop(misaligned, write ? writing : reading, address, 32);
    check<16>(address, write);
    check<16>(address + 16, write);
  } else {
    void* const at = (void*)address;
    switch (Size) {
      case 1: write ? __tsan_write1(at) : __tsan_read1(at); break;
      case 2: write ? __tsan_write2(at) : __tsan_read2(at); break;
      case 4: write ? __tsan_write4(at) : __tsan_read4(at); break;
      case 8: write ? __tsan_write8(at) : __tsan_read8(at); break;
      default: write ? __tsan_write16(at) : __tsan_read16(at); break;
    }
  }
}

// Each gives the host's address of `Size` bytes that may be read, or written.
template <int Size> OP u8* generic(u64 address, bool write) {
  check<Size>(address, write);
  return (u8*)address;
}
template <int Size> OP u8* global(u64 address, bool write) {
  if (address - cluster_base() < most_blocks * shared_bytes)
    stop(out_of_bounds, write ? writing : reading, address, Size);
  check<Size>(address, write);
  return (u8*)address;
}
template <int Size> OP u8* shared(u64 address, bool write) {
  if (address >= shared_bytes) stop(out_of_bounds, write ? writing : reading, address, Size);
  check<Size>(shared_base() + address, write);
  return (u8*)(shared_base() + address);
}
// The same of any block of the cluster.
template <int Size> OP u8* cluster(u64 address, bool write) {
  if (address >= (1 + most_blocks) * shared_bytes)
    stop(out_of_bounds, write ? writing : reading, address, Size);
  check<Size>(shared_address(address), write);
  return (u8*)shared_address(address);
}
// Memory of one thread alone, or the launch's parameters: between `start` and `end`.
template <int Size> OP u8* within(u64 address, bool write, const u8* start, u64 bytes) {
  if (address % Size) stop(misaligned, write ? writing : reading, address, Size);
  if (address - (u64)start > bytes || bytes - (address - (u64)start) < Size)
    stop(out_of_bounds, write ? writing : reading, address, Size);
  return (u8*)address;
}

// Refuses an access before griddepcontrol.wait, in a kernel that has one: such a kernel may
// start before the one in front of it has ended.
OP void after_wait(bool waited, Access access, u64 size) {
  if (!waited) stop(early, access, 0, size);
}

template <class T> OP T get(const u8* from, int i) {
  T x;
  __builtin_memcpy(&x, from + i * sizeof x, sizeof x);
  return x;
}
template <class T> OP void put(u8* to, int i, T x) { __builtin_memcpy(to + i * sizeof x, &x, sizeof x); }

OP u64 atomic(EmuAtomicOp op, u64 address, unsigned size, u64 value, u64 compare) {
  return emu_atomic(op, (void*)address, size, value, compare);
}

// A thread that turns this often without an end waits for what never comes.
static const u64 most_turns = 1ull << 28;
#define TURN() \
  if (++turns > most_turns) stop(endless, nothing, 0, 0)
