#include "access.h"

#include <algorithm>

#include "history.h"
#include "scheduler.h"

namespace emu {

namespace {

// Windows of recent addresses: they make a checked access cheap.
struct Lookup {
  uint64_t page_number;
  Window* window;
  Page* page;
};
constexpr unsigned lookup_count = 512;
Lookup lookups[lookup_count];

// One access on its way through the checks.
struct Check {
  Thread& thread;
  Window& window;
  uint64_t address, size;
  Access access;
  uint64_t code;

  bool shared() const { return window.space == Space::shared; }
  bool writes() const { return access != Access::read; }

  Fault describe(Kind kind) const {
    Fault fault{};
    fault.kind = kind;
    fault.access = access;
    fault.address = address;
    fault.size = size;
    fault.window = window.id;
    fault.code = code;
    fault.other_thread = -1;
    fault.other_block = -1;
    return fault;
  }

  // `epoch`, `number`: when and by whom the conflicting access was made.
  [[noreturn]] void conflict(Access other, uint32_t epoch, int number) const {
    const bool same_cluster = epoch >= machine.cluster_epoch;
    Fault fault = describe(same_cluster ? Kind::race : Kind::block_race);
    fault.other_access = other;
    fault.other_thread = number;
    if (!same_cluster) fault.other_block = block_of_epoch(epoch, number < 0 ? 0 : rank_of(unsigned(number)));
    raise(fault);
  }

  // Before this epoch nothing in this memory can conflict: other launches, or, for shared memory,
  // other clusters.
  uint32_t oldest() const { return shared() ? machine.cluster_epoch : machine.launch_epoch; }

  bool happened_before(uint32_t epoch, unsigned number, uint32_t stamp) const {
    if (epoch < machine.cluster_epoch) return published(epoch, number, stamp);
    return ordered_in_cluster(epoch, number, stamp);
  }
};

// The host may have filled memory that was born without content: then its bytes are not all 0xFF.
// One byte of a number may be, so up to 8 bytes are asked about at once if they are read at once,
// less what kernels wrote.
bool host_wrote(const Check& check, Cell& cell, uint64_t address, uint64_t size) {
  uint64_t reach = size;
  while (reach < check.size && reach < uint64_t{1} << coarsest) reach *= 2;
  uint64_t start = address & ~(reach - 1), count = reach / size;
  Cell* first = &cell - (address - start) / size;
  bool wrote = false;
  for (uint64_t i = 0; i < count; ++i) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(start + i * size);
    wrote |= !first[i].initialised &&
             std::any_of(bytes, bytes + size, [](unsigned char byte) { return byte != 0xFF; });
  }
  if (wrote)
    for (uint64_t i = 0; i < count; ++i) first[i].initialised = 1;
  return wrote;
}

void check_initialised(const Check& check, Cell& cell, uint64_t cell_address, uint64_t cell_size) {
  if (check.shared()) {
    if (cell.write_epoch >= machine.cluster_epoch) return;
  } else {
    if (cell.initialised || host_wrote(check, cell, cell_address, cell_size)) return;
  }
  raise(check.describe(Kind::uninitialised));
}

void check_last_write(const Check& check, const Cell& cell) {
  if (cell.write_epoch < check.oldest()) return;
  if (!check.happened_before(cell.write_epoch, cell.writer, cell.write_stamp))
    check.conflict(Access::write, cell.write_epoch, cell.writer);
}

void check_atomics(const Check& check, Cell& cell, uint64_t cell_address, uint64_t cell_size) {
  const AtomicTouch* touch = unordered_atomic(cell_address, cell_size, check.shared());
  if (touch) check.conflict(Access::atomic, touch->epoch, int(touch->thread));
  if (check.writes()) {
    forget_atomics(cell_address, cell_size);
    cell.atomic = 0;
  }
}

// Did all reads of this cluster that a cell remembers happen before the current access?
bool reads_happened_before(const Check& check, const Cell& cell) {
  const Thread& now = check.thread;
  if (cell.scattered) return cell.read_epoch < now.joined;
  if (cell.read_epoch < (rank_of(cell.reader) == now.rank ? now.floor : now.joined)) return true;
  if (cell.many_warps) return false;
  const unsigned first_of_warp = cell.reader & ~(warp_size - 1);
  for (uint32_t lanes = cell.read_lanes; lanes; lanes &= lanes - 1) {
    const unsigned reader = first_of_warp + unsigned(__builtin_ctz(lanes));
    if (!ordered_in_cluster(cell.read_epoch, reader, cell.read_stamp)) return false;
  }
  return true;
}

void check_readers(const Check& check, const Cell& cell) {
  if (cell.read_epoch < check.oldest()) return;
  if (!check.shared()) {
    bool alone = !cell.many_warps && !(cell.read_lanes & (cell.read_lanes - 1));
    if (cell.other_block) check.conflict(Access::read, machine.launch_epoch, -1);
    if (cell.read_epoch < machine.cluster_epoch &&
        !(alone && published(cell.read_epoch, cell.reader, cell.read_stamp)))
      check.conflict(Access::read, cell.read_epoch, cell.reader);
  }
  if (cell.read_epoch < machine.cluster_epoch || reads_happened_before(check, cell)) return;
  bool self = cell.reader == check.thread.number;
  check.conflict(Access::read, cell.read_epoch, self ? -1 : int(cell.reader));
}

// Several threads may have read; kept are those whose reads nothing orders before this one.
void join_readers(const Check& check, Cell& cell) {
  unsigned first_of_warp = cell.reader & ~(warp_size - 1);
  if (cell.many_warps || cell.reader / warp_size != check.thread.warp) {
    cell.many_warps = 1;
  } else {
    for (uint32_t lanes = cell.read_lanes; lanes; lanes &= lanes - 1) {
      unsigned lane = unsigned(__builtin_ctz(lanes));
      if (ordered_in_cluster(cell.read_epoch, first_of_warp + lane, cell.read_stamp))
        cell.read_lanes &= ~(1u << lane);
    }
    cell.read_lanes |= 1u << check.thread.lane;
  }
  cell.read_stamp = check.thread.stamp;
  if (!cell.many_warps || cell.reader == check.thread.number) cell.reader = check.thread.number;
}

void record_read(const Check& check, Cell& cell) {
  const uint32_t epoch = check.thread.epoch;
  if (cell.read_epoch == epoch && !cell.scattered) {
    join_readers(check, cell);
    return;
  }
  if (cell.read_epoch >= machine.cluster_epoch && !reads_happened_before(check, cell)) {
    cell.scattered = 1;
    cell.read_epoch = std::max(cell.read_epoch, epoch);
    return;
  }
  cell.other_block = cell.read_epoch >= machine.launch_epoch &&
                     (cell.read_epoch < machine.cluster_epoch || cell.other_block);
  cell.scattered = 0;
  cell.read_epoch = epoch;
  cell.read_stamp = check.thread.stamp;
  cell.read_lanes = 1u << check.thread.lane;
  cell.reader = check.thread.number;
  cell.many_warps = 0;
}

void record_write(const Check& check, Cell& cell) {
  cell.write_epoch = check.thread.epoch;
  cell.write_stamp = check.thread.stamp;
  cell.writer = check.thread.number;
  cell.initialised = 1;
  cell.read_epoch = 0;  // all reads lie before this write
  cell.scattered = 0;
  cell.other_block = 0;
}

void touch(const Check& check, Cell& cell, uint64_t address, uint64_t size) {
  if (check.access != Access::write && (check.shared() || !cell.initialised))
    check_initialised(check, cell, address, size);
  check_last_write(check, cell);
  if (check.access == Access::atomic) {
    check_readers(check, cell);
    cell.atomic = 1;
    return;
  }
  if (cell.atomic) check_atomics(check, cell, address, size);
  if (check.access == Access::read) {
    record_read(check, cell);
  } else {
    check_readers(check, cell);
    record_write(check, cell);
  }
}

void touch_cells(const Check& check, Lookup* lookup) {
  uint64_t address = check.address, left = check.size;
  while (left) {
    uint64_t in_page = page_bytes - (address & (page_bytes - 1));
    uint64_t size = left < in_page ? left : in_page;
    Page* page = lookup && lookup->page ? lookup->page : machine.shadow.page(address, size);
    if ((address | size) & ((uint64_t{1} << page->shift) - 1))
      page = machine.shadow.page(address, size);
    if (lookup) lookup->page = page;
    lookup = nullptr;  // only the first page is remembered
    uint64_t cell_size = uint64_t{1} << page->shift;
    Cell* cell = page->at(address);
    for (uint64_t done = 0; done < size; done += cell_size)
      touch(check, *cell++, address + done, cell_size);
    address += size;
    left -= size;
  }
}

[[noreturn]] void refuse(uint64_t address, uint64_t size, Access access, Kind kind, int64_t window,
                         uint64_t code, Misuse misuse = {}) {
  Fault fault{};
  fault.kind = kind;
  fault.access = access;
  fault.address = address;
  fault.size = size;
  fault.window = window;
  fault.code = code;
  fault.other_thread = -1;
  fault.other_block = -1;
  fault.detail = uint64_t(misuse);
  raise(fault);
}

// Another block's shared memory exists from the block's start to its end.
void check_visit(const Check& check) {
  Block& there = machine.blocks[check.window.rank];
  auto refuse_for = [&](Misuse misuse) {
    refuse(check.address, check.size, check.access, Kind::cluster, check.window.id, check.code, misuse);
  };
  if (!check.thread.joined) refuse_for(Misuse::not_started);
  if (!there.live) refuse_for(Misuse::ended);
  there.visited = std::max(there.visited, check.thread.epoch);
}

}  // namespace

void clear_lookups() {
  constexpr uint64_t none = ~uint64_t{0};  // not 0: that is the page of null pointers
  std::fill_n(lookups, lookup_count, Lookup{none, nullptr, nullptr});
}

void check_access(uint64_t address, uint64_t size, Access access, bool aligned, uint64_t code) {
  Thread& thread = *machine.current;
  if (address - thread.stack_low < stack_bytes) return;  // its own local variables
  if (--accesses_left < 0) pause(code);
  bool writes = access != Access::read;
  Lookup& lookup = lookups[(address >> page_bits) % lookup_count];
  if (lookup.page_number != address >> page_bits || !lookup.window->holds(address, size) ||
      (writes && !lookup.window->writable)) {
    Kind kind = Kind::none;
    int64_t nearest = no_window;
    Window* window = machine.windows.find(address, size, writes, kind, nearest);
    if (!window && address >= no_rank)
      refuse(address, size, access, Kind::cluster, no_window, code,
             address < not_shared ? Misuse::rank : Misuse::not_shared);
    if (!window) refuse(address, size, access, kind, nearest, code);
    lookup = {address >> page_bits, window, nullptr};
  }
  Window& window = *lookup.window;
  if (aligned && (address & (size - 1)))
    refuse(address, size, access, Kind::misaligned, window.id, code);
  if (access != Access::write) window.read_bytes += size;
  if (writes) window.written_bytes += size;
  if (!window.tracked) return;
  const Check check{thread, window, address, size, access, code};
  if (check.shared() && window.rank != thread.rank) check_visit(check);
  touch_cells(check, &lookup);
}

}  // namespace emu

using namespace emu;

#define CODE reinterpret_cast<uint64_t>(__builtin_return_address(0))
#define ADDRESS reinterpret_cast<uint64_t>(p)

// Functions that g++ -fsanitize=thread calls before each access. The `unaligned` forms and the ranges come
// from copies that state no alignment, which a GPU makes byte by byte.
#define EMU_ACCESSES(n) \
  EMU_API void __tsan_read##n(void* p) { check_access(ADDRESS, n, Access::read, true, CODE); } \
  EMU_API void __tsan_write##n(void* p) { check_access(ADDRESS, n, Access::write, true, CODE); } \
  EMU_API void __tsan_unaligned_read##n(void* p) { \
    check_access(ADDRESS, n, Access::read, false, CODE); \
  } \
  EMU_API void __tsan_unaligned_write##n(void* p) { \
    check_access(ADDRESS, n, Access::write, false, CODE); \
  }
EMU_ACCESSES(1)
EMU_ACCESSES(2)
EMU_ACCESSES(4)
EMU_ACCESSES(8)
EMU_ACCESSES(16)
EMU_API void __tsan_read_range(void* p, size_t n) {
  check_access(ADDRESS, n, Access::read, false, CODE);
}
EMU_API void __tsan_write_range(void* p, size_t n) {
  check_access(ADDRESS, n, Access::write, false, CODE);
}

EMU_API void __tsan_init() {}

// The chain of calls tells two calls of one function apart (see Place).
EMU_API void __tsan_func_entry(void* caller) {
  Thread& thread = *machine.current;
  if (thread.depth + 1 >= max_depth) return;
  uint64_t above = thread.calls[thread.depth];
  thread.calls[++thread.depth] = above * 0x9E3779B97F4A7C15u + reinterpret_cast<uint64_t>(caller);
}
EMU_API void __tsan_func_exit() {
  Thread& thread = *machine.current;
  if (thread.depth) --thread.depth;
}
