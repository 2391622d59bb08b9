// Special registers, and what the lanes of a warp or the threads of a block do together.
#pragma once

#include "abi.h"
#include "bits.h"

OP u32 thread_number() {
  const EmuDim at = emu_thread_index(), size = emu_block_dim();
  return at.x + size.x * (at.y + size.y * at.z);
}
OP u32 laneid() { return thread_number() % 32; }
OP u32 warpid() { return thread_number() / 32; }
OP u32 lanemask_eq() { return 1u << laneid(); }
OP u32 lanemask_lt() { return lanemask_eq() - 1; }
OP u32 lanemask_le() { return lanemask_lt() | lanemask_eq(); }
OP u32 lanemask_gt() { return ~lanemask_le(); }
OP u32 lanemask_ge() { return ~lanemask_lt(); }

// No time passes but by asking: a loop that waits for the clock soon ends.
inline u64 clock_ticks;
OP u64 clock64() { return clock_ticks += 1 << 20; }

OP EmuDim clusterid() {
  const EmuDim block = emu_block_index(), size = emu_cluster_dim();
  return {block.x / size.x, block.y / size.y, block.z / size.z};
}
OP EmuDim nclusterid() {
  const EmuDim grid = emu_grid_dim(), size = emu_cluster_dim();
  return {grid.x / size.x, grid.y / size.y, grid.z / size.z};
}
OP EmuDim cluster_ctaid() {
  const EmuDim block = emu_block_index(), size = emu_cluster_dim();
  return {block.x % size.x, block.y % size.y, block.z % size.z};
}
OP EmuDim cluster_nctaid() { return emu_cluster_dim(); }
OP u32 cluster_ctarank() { return emu_cluster_rank(); }
OP u32 cluster_nctarank() {
  const EmuDim size = emu_cluster_dim();
  return size.x * size.y * size.z;
}

// shfl: lanes stand in segments, and `c` holds the mask of what numbers a segment, and a limit.
// A lane whose partner lies beyond the limit keeps its own value, and its predicate is false.
enum Shuffle { up, down, bfly, idx };
struct Partner { u32 lane; u8 inside; };
template <Shuffle S> OP Partner partner(u32 operand, u32 c) {
  const u32 lane = laneid(), by = operand & 31, segment = c >> 8 & 31, limit = c & 31;
  const u32 least = lane & segment, most = least | (limit & ~segment);
  int at = 0;
  bool inside = false;
  switch (S) {
    case up: at = int(lane) - int(by); inside = at >= int(most); break;
    case down: at = lane + by; inside = at <= int(most); break;
    case bfly: at = lane ^ by; inside = at <= int(most); break;
    case idx: at = least | (by & ~segment); inside = at <= int(most); break;
  }
  return {inside ? u32(at) : lane, inside};
}
OP u32 shuffled(u32 value, u32 lane, u32 mask) { return emu_warp(EMU_SHUFFLE_INDEX, mask, value, lane, 32); }

OP u32 ballot(u8 p, u32 mask) { return emu_warp(EMU_BALLOT, mask, p, 0, 32); }
OP u8 vote_any(u8 p, u32 mask) { return ballot(p, mask) != 0; }
OP u8 vote_all(u8 p, u32 mask) { return ballot(!p, mask) == 0; }
OP u8 vote_uni(u8 p, u32 mask) {
  const u32 yes = ballot(p, mask), no = ballot(!p, mask);
  return !yes || !no;
}
// Every set that holds the caller is a legal answer; this one promises nothing.
OP u32 activemask() { return lanemask_eq(); }

template <class F> OP u32 reduced(u32 value, u32 mask, F combine) {
  u32 result = 0;
  bool first = true;
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    const u32 other = shuffled(value, lane, mask);
    result = first ? other : combine(result, other);
    first = false;
  }
  return result;
}
enum Reduce { add_all, min_all, max_all, and_all, or_all, xor_all };
template <Reduce O, class T> OP u32 redux(u32 value, u32 mask) {
  return reduced(value, mask, [](u32 a, u32 b) {
    switch (O) {
      case add_all: return a + b;
      case min_all: return T(a) < T(b) ? a : b;
      case max_all: return T(a) > T(b) ? a : b;
      case and_all: return a & b;
      case or_all: return a | b;
      default: return a ^ b;
    }
  });
}

// Barriers that reduce the predicates of all threads of the block.
OP u32 barrier_popc(u8 p) { return emu_barrier(p); }
OP u8 barrier_or(u8 p) { return emu_barrier(p) != 0; }
OP u8 barrier_and(u8 p) { return emu_barrier(!p) == 0; }
