// A fault ends the launch before the offending operation happens; Python words the message.
#pragma once
#include <cstdint>

namespace emu {

// The order is faults.py's KINDS.
enum class Kind : uint32_t {
  none,
  out_of_bounds,
  misaligned,
  read_only,
  uninitialised,
  race,
  block_race,
  barrier,
  shuffle,
  mask,
  deadlock,
  null_pointer,
  trap,
  cluster,
  early,
};

enum class Access : uint32_t { none, read, write, atomic };

// Errors of a cluster: the `detail` of Kind::cluster. The order is faults.py's.
enum class Misuse : uint64_t {
  not_started,    // another block's shared memory, before a barrier of the cluster
  ended,          // the same, after that block has ended
  ends_early,     // a block ends while another may access its shared memory
  rank,           // an address mapped to a rank that no block of the cluster has
  not_shared,     // one mapped from outside the block's shared memory
  not_arrived,    // waits without having arrived
  arrived_twice,  // arrives again without having waited
  part_arrived,   // a block's barrier between the arrivals of its threads at the cluster's
  too_many,       // barriers of a block between two of the cluster
};

constexpr int64_t no_window = INT64_MIN;

// Mirrored field by field in runtime.py.
struct Fault {
  Kind kind;
  Access access;
  uint32_t block[3];
  uint32_t thread[3];
  uint64_t address;
  uint64_t size;
  int64_t window;      // the launch's window (>= 0), a registered one (~handle), or no_window
  uint64_t code;       // offset of the instruction in the kernel's library
  Access other_access; // of the other thread, where there is one
  int32_t other_thread; // flat number in its block (for `raise`, in its cluster); -1: none or several
  int64_t other_block; // flat number in the grid; -1: none or this one
  uint64_t other_code;
  uint64_t detail;     // a mask, a lane, a count: see faults.py
};

// Records `fault`, fills in who and where, and leaves the kernel for good.
[[noreturn]] void raise(Fault fault);

}  // namespace emu
