// The interface between a kernel's translation unit and the emulator's runtime.
// Built-in types only: a kernel sees no standard header under NVRTC, so it sees none here either.
#pragma once

#define EMU_API extern "C" __attribute__((visibility("default")))

struct EmuDim {
  unsigned x, y, z;
};

enum EmuWarpOp : int {
  EMU_SHUFFLE_INDEX,
  EMU_SHUFFLE_UP,
  EMU_SHUFFLE_DOWN,
  EMU_SHUFFLE_XOR,
  EMU_BALLOT,
  EMU_SYNC_WARP,
};

enum EmuAtomicOp : int {
  EMU_ATOMIC_ADD,
  EMU_ATOMIC_INC,
  EMU_ATOMIC_MIN_SIGNED,
  EMU_ATOMIC_MIN_UNSIGNED,
  EMU_ATOMIC_MAX_SIGNED,
  EMU_ATOMIC_MAX_UNSIGNED,
  EMU_ATOMIC_EXCHANGE,
  EMU_ATOMIC_COMPARE_AND_SWAP,
  EMU_ATOMIC_OR,
  EMU_ATOMIC_AND,
  EMU_ATOMIC_XOR,
  EMU_ATOMIC_DEC,
};

// Constant for the life of a thread, hence `const`: the compiler may keep the value in a register.
EMU_API EmuDim emu_thread_index() __attribute__((const));
EMU_API EmuDim emu_block_index() __attribute__((const));
EMU_API EmuDim emu_block_dim() __attribute__((const));
EMU_API EmuDim emu_grid_dim() __attribute__((const));
EMU_API EmuDim emu_cluster_dim() __attribute__((const));  // in blocks
EMU_API unsigned emu_cluster_rank() __attribute__((const));
EMU_API unsigned char* emu_dynamic_shared() __attribute__((const));

// Wait for the whole block; the number of threads whose predicate was not zero.
EMU_API int emu_barrier(int predicate);
// Arrive at the cluster's barrier, which releases what was done before; wait there for all others.
EMU_API void emu_cluster_arrive();
EMU_API void emu_cluster_wait();
// The same place as `address`, which is in the block's shared memory, in that of another block.
EMU_API void* emu_map_shared(const void* address, unsigned rank);
// Wait for the lanes of `mask`; the operation's result for this lane.
EMU_API unsigned long long emu_warp(EmuWarpOp op, unsigned mask, unsigned long long value,
                                    int operand, int width);
// The old value at `address`, which `op` replaced.
EMU_API unsigned long long emu_atomic(EmuAtomicOp op, void* address, unsigned size,
                                      unsigned long long value, unsigned long long compare);
EMU_API void emu_fence();
EMU_API void emu_trap();
// Ends the launch for a reason that the caller found: fault.h's Kind, and what was accessed.
EMU_API void emu_stop(unsigned kind, unsigned access, unsigned long long address,
                      unsigned long long size);
