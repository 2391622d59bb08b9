// The state of the launch at hand: its threads, warps and clocks. One launch runs at a time, and
// its blocks run one after another, so there is one of everything.
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
constexpr unsigned max_warps = max_threads / warp_size;

// Where a thread that cannot run has got to; of one that can it means nothing.
enum class State : uint8_t { running, at_barrier, at_warp_op, done };

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
  // The same in every block of a launch.
  uintptr_t stack_low;
  EmuDim index;
  unsigned number, warp, lane;

  Context context;
  State state;
  uint32_t stamp;  // of the last warp operation that this thread took part in
  Place place;     // where it waits
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

enum class Schedule : uint32_t { ascending, descending, shuffled, preempted, run_ahead };

// Mirrored field by field in runtime.py.
struct Launch {
  void (*invoke)(void**);
  void** values;
  uint32_t grid[3], block[3];
  uint64_t shared_bytes;
  Window* windows;
  uint64_t window_count;
  const uint64_t* blocks;  // the only blocks to run, by flat number; nullptr: all
  uint64_t block_count;
  Schedule schedule;
  uint32_t padding;
  uint64_t seed;
  uint64_t read_bytes, written_bytes;  // results: what went through registered windows
  uint64_t accesses, switches;         // results: how much work the emulator did
};

struct Machine {
  Launch* launch = nullptr;
  Thread* current = nullptr;
  unsigned threads_count = 0, warps_count = 0;
  EmuDim block_index{}, block_dim{}, grid_dim{};
  uint64_t block = 0;  // flat number

  uint32_t epoch = 0;         // now
  uint32_t block_epoch = 0;   // the first of this block
  uint32_t launch_epoch = 0;  // the first of this launch
  uint32_t tick = 0;          // the last stamp given
  uint32_t block_tick = 0;    // the stamp that threads of this block start with

  Windows windows;
  Shadow shadow;
  Fault fault{};
  Context host;  // whoever called launch()
  Barrier barrier{};
  uint64_t counted = 0;  // the result of the last barrier: all read it before the next completes
  Thread threads[max_threads];
  Warp warps[max_warps];
};

extern Machine machine;
extern unsigned char* const dynamic_shared;
constexpr uint64_t dynamic_shared_capacity = 1 << 20;

// Did an access by `thread` of this block, in `epoch` and under `stamp`, happen before what
// the current thread does now?
inline bool ordered_in_block(uint32_t epoch, unsigned thread, uint32_t stamp) {
  const Thread& now = *machine.current;
  if (epoch < machine.epoch || thread == now.number) return true;
  if (thread / warp_size != now.warp) return false;
  const Warp& warp = machine.warps[now.warp];
  return stamp < warp.synced || stamp < warp.known[now.lane][thread % warp_size];
}

// The flat number of the block that an epoch of this launch belongs to.
int64_t block_of_epoch(uint32_t epoch);

}  // namespace emu
