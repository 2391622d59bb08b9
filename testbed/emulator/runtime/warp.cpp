#include "warp.h"

#include <algorithm>

#include "scheduler.h"

namespace emu {

namespace {

uint32_t bit(unsigned lane) { return 1u << lane; }

template <class Visit>
void each_lane(uint32_t lanes, Visit visit) {
  for (; lanes; lanes &= lanes - 1) visit(unsigned(__builtin_ctz(lanes)));
}

Thread& lane_of(const Thread& thread, unsigned lane) {
  return machine.threads[thread.warp * warp_size + lane];
}

[[noreturn]] void fail(Kind kind, Thread& at, int other_lane, uint64_t detail) {
  machine.current = &at;
  Fault fault{};
  fault.kind = kind;
  fault.code = at.place.code;
  fault.window = no_window;
  fault.other_block = -1;
  fault.other_thread = other_lane < 0 ? -1 : int32_t(at.warp * warp_size + other_lane);
  if (other_lane >= 0 && lane_of(at, other_lane).number % max_threads < machine.threads_count)
    fault.other_code = lane_of(at, other_lane).place.code;
  fault.detail = detail;
  raise(fault);
}

// The lane that a shuffle reads: as PTX defines shfl.sync. An index past the segment is one's own.
unsigned source_lane(const Thread& thread) {
  const WarpRequest& request = thread.request;
  int lane = int(thread.lane), width = request.width;
  int first = lane & ~(width - 1), last = first + width - 1;
  switch (request.op) {
    case EMU_SHUFFLE_INDEX:
      return first | (request.operand & (width - 1));
    case EMU_SHUFFLE_UP:
      return lane - request.operand < first ? lane : lane - request.operand;
    case EMU_SHUFFLE_DOWN:
      return lane + request.operand > last ? lane : lane + request.operand;
    default: {
      int source = lane ^ (request.operand & 31);
      return source > last ? lane : source;
    }
  }
}

// Everything that any lane of `lanes` did so far now lies before what all of them do next.
void advance(Warp& warp, uint32_t lanes, Thread* threads) {
  uint32_t tick = ++machine.tick;
  if (lanes == warp.members) {
    warp.synced = tick;
  } else {
    uint32_t merged[warp_size] = {};
    each_lane(lanes, [&](unsigned lane) {
      for (unsigned k = 0; k < warp_size; ++k)
        merged[k] = std::max(merged[k], warp.known[lane][k]);
    });
    each_lane(lanes, [&](unsigned lane) { merged[lane] = tick; });
    each_lane(lanes, [&](unsigned lane) { std::copy_n(merged, warp_size, warp.known[lane]); });
  }
  each_lane(lanes, [&](unsigned lane) { threads[lane].stamp = tick; });
}

void check_agreement(Thread& first, Thread& other) {
  const WarpRequest &a = first.request, &b = other.request;
  if (a.mask != b.mask) fail(Kind::mask, other, int(first.lane), a.mask);
  if (a.op != b.op || !(first.place == other.place))
    fail(Kind::shuffle, other, int(first.lane), a.mask);
}

// Completes the operation of `thread`'s group if all its lanes have arrived.
void try_complete(Thread& thread) {
  Warp& warp = machine.warps[thread.warp];
  Thread* threads = &lane_of(thread, 0);
  uint32_t group = thread.request.mask & warp.live;
  if (group & ~warp.waiting) return;
  each_lane(group, [&](unsigned lane) { check_agreement(thread, threads[lane]); });
  uint64_t votes = 0;
  if (thread.request.op == EMU_BALLOT)
    each_lane(group, [&](unsigned lane) {
      if (threads[lane].request.value) votes |= bit(lane);
    });
  each_lane(group, [&](unsigned lane) {
    Thread& reader = threads[lane];
    if (reader.request.op > EMU_SHUFFLE_XOR) {
      reader.result = votes;
      return;
    }
    unsigned source = source_lane(reader);
    if (!(group & bit(source))) fail(Kind::shuffle, reader, int(source), reader.request.mask);
    reader.result = threads[source].request.value;
  });
  warp.waiting &= ~group;
  advance(warp, group, threads);
}

}  // namespace

void leave_warp(Thread& thread) {
  Warp& warp = machine.warps[thread.warp];
  uint32_t waiting = warp.waiting;
  each_lane(waiting, [&](unsigned lane) {
    if (warp.waiting & bit(lane)) try_complete(lane_of(thread, lane));
  });
}

}  // namespace emu

using namespace emu;

EMU_API unsigned long long emu_warp(EmuWarpOp op, unsigned mask, unsigned long long value,
                                    int operand, int width) {
  Thread& thread = *machine.current;
  thread.place = {uint64_t(__builtin_return_address(0)), thread.calls[thread.depth]};
  thread.request = {op, mask, value, operand, width};
  if (!(mask & bit(thread.lane))) fail(Kind::mask, thread, -1, mask);
  if (width < 1 || width > 32 || (width & (width - 1)))
    fail(Kind::shuffle, thread, -1, uint64_t(width));
  thread.state = State::at_warp_op;
  thread.spun = 0;
  machine.warps[thread.warp].waiting |= bit(thread.lane);
  try_complete(thread);
  reschedule();
  return thread.result;
}

EMU_API int emu_barrier(int predicate) {
  Thread& thread = *machine.current;
  thread.place = {uint64_t(__builtin_return_address(0)), thread.calls[thread.depth]};
  thread.state = State::at_barrier;
  thread.spun = 0;
  machine.warps[thread.warp].halted |= bit(thread.lane);
  Barrier& barrier = machine.blocks[thread.rank].barrier;
  if (!barrier.arrived++) barrier.place = thread.place;
  barrier.split |= !(thread.place == barrier.place);
  barrier.votes += uint64_t(predicate);
  reschedule();
  return int(machine.blocks[thread.rank].counted);
}
