// The rarer half of happens-before: atomics, which exempt each other only, and the order between
// blocks that a fence and an atomic on the same word make (the "last block sums up" pattern).
#pragma once
#include <cstdint>

#include "machine.h"

namespace emu {

// Is an access by another block of this launch published to the current thread?
bool published(uint32_t epoch, unsigned thread, uint32_t stamp);

// Someone whose atomic on this word is not ordered before the current thread's access.
struct AtomicTouch {
  uint32_t cluster_epoch, epoch, stamp;
  unsigned thread;
};
const AtomicTouch* unordered_atomic(uint64_t address, uint64_t size, bool shared);

void record_atomic(uint64_t address, uint64_t size);
// A plain write came after all atomics on the word.
void forget_atomics(uint64_t address, uint64_t size);

void begin_launch_history();
void begin_cluster_history();

}  // namespace emu
