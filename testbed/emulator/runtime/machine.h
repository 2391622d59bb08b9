// The state of the launch at hand: its threads, warps and clocks. One launch runs at a time, and
// its clusters run one after another, so there is one of everything. A block of a kernel without
// clusters is a cluster of its own.
#pragma once
#include <cstdint>
#include <vector>

#include "abi.h"
#include "fault.h"
#include "fiber.h"
#include "shadow.h"
#include "windows.h"

namespace emu {

constexpr unsigned warp_size = 32;
constexpr unsigned max_warps = max_threads / warp_size;  // of a block

// The place at which a thread waits or has ended; of one that can run it means nothing.
enum class State : uint8_t { running, at_barrier, at_warp_op, done, at_cluster_barrier };

// A place in the kernel: the instruction, and the calls that led to it. Two inlined copies of
// one source line are two places, and so are two calls of one function.
struct Place {
  uint64_t code = 0;
  uint64_t calls = 0;
  bool operator==(const Place& other) const { return code == other.code && calls == other.calls; }
};

struct WarpRequest {
  EmuWarpOp op;
  uint32_t mask;
  uint64_t value;
  int operand, width;
};

constexpr unsigned max_depth = 30;

struct Thread {
  // The same in every cluster of a launch.
  uintptr_t stack_low;
  EmuDim index;
  unsigned number;  // in the cluster: max_threads times the block's rank, and the number there
  unsigned warp, lane;
  unsigned rank;  // of its block

  Context context;
  State state;
  bool arrived;     // at the cluster's barrier, and has not waited yet
  uint32_t phase;   // of the cluster's barrier when it arrived
  uint32_t epoch;   // of what it does now
  uint32_t floor;   // what its block did in epochs before this one, happened before now
  uint32_t joined;  // the same of all blocks of the cluster; 0 before its first barrier
  uint32_t stamp;   // of the last warp operation that this thread took part in
  Place place;      // where it waits
  WarpRequest request;
  uint64_t result;  // of a warp operation
  int64_t spun;     // accesses since it last waited, up to the slice at hand
  unsigned depth;
  uint64_t calls[max_depth];  // running hash of the chain of calls, by depth
};

// Order between lanes inside one barrier interval. `known[a][b]` = T: what lane b did with a stamp
// below T happened before what lane a does now. Full operations move `synced` for all lanes.
struct Warp {
  uint32_t live;     // lanes that exist and have not returned
  uint32_t members;  // lanes that exist
  uint32_t waiting;  // lanes that wait in a warp operation
  uint32_t halted;   // lanes that stand at a barrier
  uint32_t synced;
  uint32_t known[warp_size][warp_size];

  uint32_t ready() const { return live & ~waiting & ~halted; }
};

// The barrier that threads of the block are arriving at.
struct Barrier {
  unsigned arrived;
  bool split;     // are some at another place than the first one?
  Place place;    // of the first one
  uint64_t votes; // how many predicates were not zero
};

struct Block {
  EmuDim index;
  Barrier barrier;
  uint64_t counted;  // the result of the last barrier: all read it before the next completes
  unsigned live;     // threads
  uint32_t joined;   // the most that a thread of it knows
  uint32_t visited;  // the last epoch in which another block accessed its shared memory
};

// The cluster's barrier. The epochs of what follows an arrival lie above `next`, those of what comes
// before it below: so what is below happened before all that follows the wait.
struct ClusterBarrier {
  unsigned arrived;
  uint32_t phase;   // how often it has completed
  uint32_t next;
  uint32_t after;   // the last epoch above `next` that was given
  uint32_t joined;  // `next` of the phase before
};

enum class Schedule : uint32_t { ascending, descending, shuffled, preempted, run_ahead };

// Mirrored field by field in runtime.py.
struct Launch {
  void (*const* invokes)(void**);  // for each rank: its block has shared memory of its own there
  void** values;
  uint32_t grid[3], block[3], cluster[3];
  Schedule schedule;
  uint64_t shared_bytes;
  Window* windows;
  uint64_t window_count;
  const uint64_t* blocks;  // the only blocks to run, by flat number; nullptr: all
  uint64_t block_count;
  uint64_t seed;
  uint64_t read_bytes, written_bytes;  // results: what went through registered windows
  uint64_t accesses, switches;         // results: how much work the emulator did
};

struct Machine {
  Launch* launch = nullptr;
  Thread* current = nullptr;
  unsigned threads_count = 0, warps_count = 0;  // of a block
  unsigned cluster_size = 0;
  EmuDim block_dim{}, grid_dim{}, cluster_dim{};

  uint32_t epoch = 0;          // the last one given, but for those above the cluster's `next`
  uint32_t cluster_epoch = 0;  // the first of this cluster
  uint32_t launch_epoch = 0;   // the first of this launch
  uint32_t tick = 0;           // the last stamp given
  uint32_t cluster_tick = 0;   // the stamp that threads of this cluster start with

  Windows windows;
  Shadow shadow;
  Fault fault{};
  Context host;  // whoever called launch()
  ClusterBarrier together{};
  Block blocks[max_cluster];
  Thread threads[max_fibers];
  Warp warps[max_fibers / warp_size];
};

extern Machine machine;
extern unsigned char* const dynamic_shared;
constexpr uint64_t dynamic_shared_capacity = 1 << 20;  // of a block; those of a cluster lie in a row
// Bases of mapped addresses that no access may use; a compiler may map before it asks.
constexpr uint64_t no_rank = uint64_t{1} << 60, not_shared = uint64_t{1} << 61;

inline unsigned rank_of(unsigned thread) { return thread / max_threads; }

// Calls visit(thread) for each of a block.
template <class Visit>
void each_thread(unsigned rank, Visit visit) {
  for (unsigned i = 0; i < machine.threads_count; ++i) visit(machine.threads[rank * max_threads + i]);
}

// Calls visit(number of the warp) for each of the cluster.
template <class Visit>
void each_warp(Visit visit) {
  for (unsigned rank = 0; rank < machine.cluster_size; ++rank)
    for (unsigned w = 0; w < machine.warps_count; ++w) visit(rank * max_warps + w);
}

// Did an access by `thread` of this cluster, in `epoch` and under `stamp`, happen before what
// the current thread does now?
inline bool ordered_in_cluster(uint32_t epoch, unsigned thread, uint32_t stamp) {
  const Thread& now = *machine.current;
  if (epoch < now.joined || thread == now.number) return true;
  if (rank_of(thread) != now.rank) return false;
  if (epoch < now.floor) return true;
  if (thread / warp_size != now.warp) return false;
  const Warp& warp = machine.warps[now.warp];
  return stamp < warp.synced || stamp < warp.known[now.lane][thread % warp_size];
}

// The flat number of the block with this rank in the cluster that an epoch of this launch is of.
int64_t block_of_epoch(uint32_t epoch, unsigned rank);

}  // namespace emu
