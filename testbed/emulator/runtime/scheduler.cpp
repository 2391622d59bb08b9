#include "scheduler.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
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
  for (unsigned w = 0; w < machine.warps_count; ++w)
    for (uint32_t ready = machine.warps[w].ready(); ready; ready &= ready - 1)
      order.push_back(w * warp_size + unsigned(__builtin_ctz(ready)));
}

void new_order() {
  if (schedule() == Schedule::run_ahead) {
    order.resize(machine.warps_count);
    std::iota(order.begin(), order.end(), 0u);
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

// Nobody can run, and not because the whole block stands at one barrier.
[[noreturn]] void raise_stuck() {
  Thread *at_barrier = nullptr, *elsewhere = nullptr, *in_warp_op = nullptr, *returned = nullptr;
  for (unsigned i = 0; i < machine.threads_count; ++i) {
    Thread& thread = machine.threads[i];
    if (thread.state == State::at_warp_op && !in_warp_op) in_warp_op = &thread;
    if (thread.state == State::done && !returned) returned = &thread;
    if (thread.state != State::at_barrier) continue;
    if (!at_barrier) at_barrier = &thread;
    else if (!(thread.place == at_barrier->place) && !elsewhere) elsewhere = &thread;
  }
  if (in_warp_op) {
    const Warp& warp = machine.warps[in_warp_op->warp];
    uint32_t missing = in_warp_op->request.mask & warp.live & ~warp.waiting;
    Thread* other = missing ? &machine.threads[in_warp_op->warp * warp_size + __builtin_ctz(missing)]
                            : nullptr;
    raise(waiting_fault(Kind::mask, *in_warp_op, other));
  }
  if (elsewhere) raise(waiting_fault(Kind::barrier, *elsewhere, at_barrier));
  raise(waiting_fault(Kind::barrier, *at_barrier, returned));
}

void release_barrier() {
  machine.counted = machine.barrier.votes;
  machine.barrier = {};
  for (unsigned w = 0; w < machine.warps_count; ++w) machine.warps[w].halted = 0;
  ++machine.epoch;
  new_order();
}

bool all_returned() {
  for (unsigned w = 0; w < machine.warps_count; ++w)
    if (machine.warps[w].live) return false;
  return true;
}

// nullptr when the block is finished.
Thread* pick() {
  for (;;) {
    if (Thread* thread = next_ready()) return thread;
    if (all_returned()) return nullptr;
    if (machine.barrier.arrived < machine.threads_count || machine.barrier.split) raise_stuck();
    release_barrier();
  }
}

void enter() {
  Thread& thread = *machine.current;
  thread.stamp = machine.block_tick;
  thread.spun = 0;
  thread.depth = 0;
  thread.calls[0] = 0;
  machine.launch->invoke(machine.launch->values);
  thread.state = State::done;
  machine.warps[thread.warp].live &= ~(1u << thread.lane);
  leave_warp(thread);
  reschedule();
  abort();  // a thread that has returned is never picked again
}

}  // namespace

void number_threads() {
  const EmuDim& dim = machine.block_dim;
  for (unsigned number = 0; number < machine.threads_count; ++number) {
    Thread& thread = machine.threads[number];
    thread.stack_low = stack_of(number);
    thread.index = {number % dim.x, number / dim.x % dim.y, number / dim.x / dim.y};
    thread.number = number;
    thread.warp = number / warp_size;
    thread.lane = number % warp_size;
  }
}

void run_block() {
  machine.block_tick = ++machine.tick;
  machine.barrier = {};
  for (unsigned w = 0; w < machine.warps_count; ++w) {
    unsigned lanes = std::min(warp_size, machine.threads_count - w * warp_size);
    Warp& warp = machine.warps[w];
    warp.members = warp.live = lanes == warp_size ? ~0u : (1u << lanes) - 1;
    warp.waiting = warp.halted = 0;
  }
  for (unsigned i = 0; i < machine.threads_count; ++i)
    prepare(machine.threads[i].context, i, enter);
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
