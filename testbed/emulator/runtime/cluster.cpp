// The cluster's barrier, and what a block does to reach another one's shared memory.
#include <dlfcn.h>

#include "scheduler.h"

namespace emu {

namespace {

// Barriers that blocks may pass between the first arrival at the cluster's barrier and the last.
constexpr uint32_t room = 4096;

[[noreturn]] void refuse(Misuse misuse, const void* code) {
  Fault fault{};
  fault.kind = Kind::cluster;
  fault.detail = uint64_t(misuse);
  fault.code = reinterpret_cast<uint64_t>(code);
  fault.window = no_window;
  fault.other_thread = -1;
  fault.other_block = -1;
  raise(fault);
}

void complete(ClusterBarrier& together) {
  together.arrived = 0;
  together.joined = together.next;
  ++together.phase;
  machine.epoch = together.after;
  wake_cluster();
}

uint64_t library_of(unsigned rank) {
  Dl_info info;
  dladdr(reinterpret_cast<void*>(machine.launch->invokes[rank]), &info);
  return reinterpret_cast<uint64_t>(info.dli_fbase);
}

bool in_shared_memory(uint64_t address, unsigned rank) {
  for (uint64_t i = 0; i < machine.launch->window_count; ++i) {
    const Window& window = machine.launch->windows[i];
    if (window.space == Space::shared && window.rank == rank && window.holds(address, 1)) return true;
  }
  return false;
}

}  // namespace

}  // namespace emu

using namespace emu;

EMU_API void emu_cluster_arrive() {
  Thread& thread = *machine.current;
  ClusterBarrier& together = machine.together;
  thread.place = {uint64_t(__builtin_return_address(0)), thread.calls[thread.depth]};
  if (thread.arrived) refuse(Misuse::arrived_twice, __builtin_return_address(0));
  if (!together.arrived++) {
    together.next = machine.epoch + room;
    together.after = together.next + machine.cluster_size - 1;
  }
  thread.arrived = true;
  thread.phase = together.phase;
  thread.epoch = together.next + thread.rank;
  if (together.arrived == machine.cluster_size * machine.threads_count) complete(together);
}

EMU_API void emu_cluster_wait() {
  Thread& thread = *machine.current;
  if (!thread.arrived) refuse(Misuse::not_arrived, __builtin_return_address(0));
  thread.place = {uint64_t(__builtin_return_address(0)), thread.calls[thread.depth]};
  thread.spun = 0;
  if (thread.phase == machine.together.phase) {
    thread.state = State::at_cluster_barrier;
    machine.warps[thread.warp].halted |= 1u << thread.lane;
    reschedule();
  }
  thread.arrived = false;
  thread.joined = machine.blocks[thread.rank].joined = machine.together.joined;
  thread.floor = thread.floor < thread.joined ? thread.joined : thread.floor;
}

EMU_API void* emu_map_shared(const void* address, unsigned rank) {
  const unsigned own = machine.current->rank;
  const uint64_t at = reinterpret_cast<uint64_t>(address);
  if (rank >= machine.cluster_size) return reinterpret_cast<void*>(no_rank + at % dynamic_shared_capacity);
  if (!in_shared_memory(at, own)) return reinterpret_cast<void*>(not_shared + at % dynamic_shared_capacity);
  const uint64_t first = reinterpret_cast<uint64_t>(dynamic_shared);
  const bool dynamic = at - first < max_cluster * dynamic_shared_capacity;
  const uint64_t here = dynamic ? own * dynamic_shared_capacity : library_of(own);
  const uint64_t there = dynamic ? rank * dynamic_shared_capacity : library_of(rank);
  return reinterpret_cast<void*>(at - here + there);
}
