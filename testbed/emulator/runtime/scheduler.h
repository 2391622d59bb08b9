// Decides which fiber runs next, and what happens when none can.
#pragma once
#include <cstdint>

#include "machine.h"

namespace emu {

// Small, seeded, and the same on every machine.
class Random {
 public:
  void seed(uint64_t value) { state_ = value * 0x9E3779B97F4A7C15u + 0x2545F4914F6CDD1Du; }
  uint64_t next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ >> 11;  // 53 bits
  }
  // The top bits of a product: a remainder takes ten times as long.
  uint64_t below(uint64_t bound) { return uint64_t((unsigned __int128)(next()) * bound >> 53); }

 private:
  uint64_t state_ = 1;
};

extern Random scheduling;

// Tells the launch's threads who they are.
void number_threads();

// Runs every thread of the blocks that machine.blocks names, until all have returned.
void run_cluster();

// Lets threads run that the cluster's barrier held up.
void wake_cluster();

// The current thread's state is set: run others, and come back when it is ready again.
void reschedule();

// The number of accesses that the current thread may make before pause() is called.
extern int64_t accesses_left;
// Lets another thread run, where the schedule preempts; finds threads that never arrive anywhere.
void pause(uint64_t code);

uint64_t accesses_so_far();
void reset_accesses();

}  // namespace emu
