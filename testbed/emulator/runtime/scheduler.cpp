#include "scheduler.h"

#include <algorithm>
#include <cstdlib>
#include <vector>

#include "warp.h"

namespace emu {

Random scheduling;
int64_t accesses_left = 0;

namespace {

// A thread that makes this many accesses between two waits is spinning on something.
constexpr int64_t spin_limit = int64_t{1} << 24;
constexpr uint64_t longest_slice = 48;

std::vector<unsigned> order;  // of threads that can run, or of warps when one of them runs ahead
unsigned cursor = 0;
int64_t slice = 0;
uint64_t accesses_done = 0;

Schedule schedule() { return machine.launch->schedule; }

template <class T>
void shuffle(std::vector<T>& items) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[scheduling.below(i)]);
}

void list_ready() {
  order.clear();
  each_warp([](unsigned w) {
    for (uint32_t ready = machine.warps[w].ready(); ready; ready &= ready - 1)
      order.push_back(w * warp_size + unsigned(__builtin_ctz(ready)));
  });
}

void new_order() {
  if (schedule() == Schedule::run_ahead) {
    order.clear();
    each_warp([](unsigned w) { order.push_back(w); });
  } else {
    list_ready();
  }
  if (schedule() == Schedule::descending) std::reverse(order.begin(), order.end());
  else if (schedule() != Schedule::ascending) shuffle(order);
  cursor = 0;
}

void start_slice() {
  accesses_done += slice - accesses_left;
  slice = schedule() == Schedule::preempted ? 1 + scheduling.below(longest_slice) : spin_limit;
  accesses_left = slice;
}

// The favourite warp goes on as long as any of its lanes can; then the next one.
Thread* next_ahead() {
  for (unsigned w : order) {
    uint32_t ready = machine.warps[w].ready();
    if (ready) return &machine.threads[w * warp_size + __builtin_ctz(ready)];
  }
  return nullptr;
}

// Every thread that can run gets its turn before any gets a second one.
Thread* next_in_turn() {
  for (;;) {
    while (cursor < order.size()) {
      unsigned number = order[cursor++];
      if (machine.warps[number / warp_size].ready() >> number % warp_size & 1)
        return &machine.threads[number];
    }
    new_order();
    if (order.empty()) return nullptr;
  }
}

Thread* next_ready() {
  return schedule() == Schedule::run_ahead ? next_ahead() : next_in_turn();
}

Fault waiting_fault(Kind kind, const Thread& waiter, const Thread* other) {
  machine.current = const_cast<Thread*>(&waiter);
  Fault fault{};
  fault.kind = kind;
  fault.code = waiter.place.code;
  fault.other_thread = other ? int32_t(other->number) : -1;
  fault.other_code = other && other->state != State::done ? other->place.code : 0;
  fault.detail = other ? uint64_t(other->state) : 0;
  fault.other_block = -1;
  fault.window = no_window;
  return fault;
}

[[noreturn]] void raise_misuse(Misuse misuse, const Thread& thread) {
  Fault fault = waiting_fault(Kind::cluster, thread, nullptr);
  fault.detail = uint64_t(misuse);
  raise(fault);
}

// Nobody of a block can run, and not because all of it stands at one barrier.
void raise_if_stuck(unsigned rank) {
  Thread *at_barrier = nullptr, *elsewhere = nullptr, *in_warp_op = nullptr, *returned = nullptr;
  each_thread(rank, [&](Thread& thread) {
    if (thread.state == State::at_warp_op && !in_warp_op) in_warp_op = &thread;
    if (thread.state == State::done && !returned) returned = &thread;
    if (thread.state != State::at_barrier) return;
    if (!at_barrier) at_barrier = &thread;
    else if (!(thread.place == at_barrier->place) && !elsewhere) elsewhere = &thread;
  });
  if (in_warp_op) {
    const Warp& warp = machine.warps[in_warp_op->warp];
    uint32_t missing = in_warp_op->request.mask & warp.live & ~warp.waiting;
    Thread* other = missing ? &machine.threads[in_warp_op->warp * warp_size + __builtin_ctz(missing)]
                            : nullptr;
    raise(waiting_fault(Kind::mask, *in_warp_op, other));
  }
  if (elsewhere) raise(waiting_fault(Kind::barrier, *elsewhere, at_barrier));
  if (at_barrier && returned) raise(waiting_fault(Kind::barrier, *at_barrier, returned));
}

// Nobody can run: somebody waits in vain, in a block or, if it is none, at the cluster's barrier.
[[noreturn]] void raise_stuck() {
  for (unsigned rank = 0; rank < machine.cluster_size; ++rank) raise_if_stuck(rank);
  Thread *waiting = nullptr, *missing = nullptr;
  for (unsigned rank = 0; rank < machine.cluster_size; ++rank)
    each_thread(rank, [&](Thread& thread) {
      if (thread.state == State::at_cluster_barrier && !waiting) waiting = &thread;
      if (!thread.arrived && !missing) missing = &thread;
    });
  raise(waiting_fault(Kind::barrier, *waiting, missing));
}

// The next barrier interval of a block: above the cluster's `next` if the block has arrived there.
uint32_t next_epoch(unsigned rank) {
  ClusterBarrier& together = machine.together;
  unsigned arrived = 0;
  each_thread(rank, [&](Thread& thread) { arrived += thread.arrived; });
  const Thread& first = machine.threads[rank * max_threads];
  if (arrived && arrived < machine.threads_count) raise_misuse(Misuse::part_arrived, first);
  if (arrived && first.phase == together.phase) return ++together.after;
  if (together.arrived && machine.epoch + 1 == together.next) raise_misuse(Misuse::too_many, first);
  return ++machine.epoch;
}

void release_barrier(unsigned rank) {
  Block& block = machine.blocks[rank];
  block.counted = block.barrier.votes;
  block.barrier = {};
  const uint32_t epoch = next_epoch(rank);
  each_thread(rank, [&](Thread& thread) { thread.epoch = thread.floor = epoch; });
  for (unsigned w = 0; w < machine.warps_count; ++w) machine.warps[rank * max_warps + w].halted = 0;
}

// Releases barriers that whole blocks stand at. Returns true if there was one.
bool release_barriers() {
  bool released = false;
  for (unsigned rank = 0; rank < machine.cluster_size; ++rank) {
    const Barrier& barrier = machine.blocks[rank].barrier;
    if (barrier.arrived < machine.threads_count || barrier.split) continue;
    release_barrier(rank);
    released = true;
  }
  if (released) new_order();
  return released;
}

bool all_returned() {
  for (unsigned rank = 0; rank < machine.cluster_size; ++rank)
    if (machine.blocks[rank].live) return false;
  return true;
}

// nullptr when the cluster is finished.
Thread* pick() {
  for (;;) {
    if (Thread* thread = next_ready()) return thread;
    if (all_returned()) return nullptr;
    if (!release_barriers()) raise_stuck();
  }
}

// The last thread of a block returns: nobody may come to its shared memory any more.
void end_block(Block& block) {
  if (block.visited && block.visited >= block.joined)
    raise_misuse(Misuse::ends_early, *machine.current);
}

void enter() {
  Thread& thread = *machine.current;
  Block& block = machine.blocks[thread.rank];
  thread.stamp = machine.cluster_tick;
  thread.spun = 0;
  thread.depth = 0;
  thread.calls[0] = 0;
  machine.launch->invokes[thread.rank](machine.launch->values);
  thread.state = State::done;
  if (!--block.live) end_block(block);
  machine.warps[thread.warp].live &= ~(1u << thread.lane);
  leave_warp(thread);
  reschedule();
  abort();  // a thread that has returned is never picked again
}

}  // namespace

void number_threads() {
  const EmuDim& dim = machine.block_dim;
  for (unsigned rank = 0; rank < machine.cluster_size; ++rank)
    for (unsigned i = 0; i < machine.threads_count; ++i) {
      Thread& thread = machine.threads[rank * max_threads + i];
      thread.rank = rank;
      thread.number = rank * max_threads + i;
      thread.stack_low = stack_of(thread.number);
      thread.index = {i % dim.x, i / dim.x % dim.y, i / dim.x / dim.y};
      thread.warp = thread.number / warp_size;
      thread.lane = i % warp_size;
    }
}

namespace {
void prepare_block(unsigned rank) {
  Block& block = machine.blocks[rank];
  block.barrier = {};
  block.live = machine.threads_count;
  block.joined = block.visited = 0;
  for (unsigned w = 0; w < machine.warps_count; ++w) {
    unsigned lanes = std::min(warp_size, machine.threads_count - w * warp_size);
    Warp& warp = machine.warps[rank * max_warps + w];
    warp.members = warp.live = lanes == warp_size ? ~0u : (1u << lanes) - 1;
    warp.waiting = warp.halted = 0;
  }
  const uint32_t epoch = machine.cluster_epoch + rank;
  each_thread(rank, [&](Thread& thread) {
    thread.arrived = false;
    thread.epoch = thread.floor = epoch;
    thread.joined = 0;
    prepare(thread.context, thread.number, enter);
  });
}
}  // namespace

void run_cluster() {
  machine.cluster_tick = ++machine.tick;
  machine.cluster_epoch = machine.epoch + 1;
  machine.epoch += machine.cluster_size;
  machine.together = {};
  for (unsigned rank = 0; rank < machine.cluster_size; ++rank) prepare_block(rank);
  new_order();
  start_slice();
  machine.current = pick();
  switch_to(machine.host, machine.current->context);
}

void reschedule() {
  Thread& from = *machine.current;
  start_slice();
  Thread* to = pick();
  if (to == &from) return;
  ++machine.launch->switches;
  machine.current = to;
  switch_to(from.context, to ? to->context : machine.host);
}

void wake_cluster() {
  for (unsigned rank = 0; rank < machine.cluster_size; ++rank)
    each_thread(rank, [](Thread& thread) {
      if (thread.state != State::at_cluster_barrier) return;
      thread.state = State::running;
      machine.warps[thread.warp].halted &= ~(1u << thread.lane);
    });
}

void pause(uint64_t code) {
  Thread& thread = *machine.current;
  thread.spun += slice;
  thread.place.code = code;
  if (thread.spun >= spin_limit) raise(waiting_fault(Kind::deadlock, thread, nullptr));
  reschedule();
}

void reset_accesses() {
  slice = accesses_left = 0;
  accesses_done = 0;
}

uint64_t accesses_so_far() { return accesses_done + uint64_t(slice - accesses_left); }

}  // namespace emu
