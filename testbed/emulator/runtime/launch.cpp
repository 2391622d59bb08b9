// The C interface that Python drives through ctypes, and the launch itself.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "access.h"
#include "history.h"
#include "scheduler.h"

namespace emu {

Machine machine;

namespace {

constexpr size_t dynamic_shared_alignment = 4096;  // whole pages of the shadow

unsigned char* reserve_shared() {
  void* base = mmap(nullptr, max_cluster * dynamic_shared_capacity, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) abort();
  static_assert(dynamic_shared_alignment == page_bytes);
  return static_cast<unsigned char*>(base);
}

struct ClusterStart {
  uint32_t epoch;
  uint64_t cluster;
};
std::vector<ClusterStart> starts;

uint64_t offset_in_library(uint64_t code) {
  Dl_info info;
  if (!code || !dladdr(reinterpret_cast<void*>(code), &info)) return 0;
  return code - reinterpret_cast<uint64_t>(info.dli_fbase);
}

EmuDim at(uint64_t flat, const EmuDim& size) {
  return {unsigned(flat % size.x), unsigned(flat / size.x % size.y), unsigned(flat / size.x / size.y)};
}
uint64_t flat(const EmuDim& index, const EmuDim& size) {
  return index.x + size.x * (index.y + uint64_t(size.y) * index.z);
}
uint64_t count(const EmuDim& size) { return uint64_t(size.x) * size.y * size.z; }

// The grid counted in clusters.
EmuDim clusters() {
  const EmuDim &grid = machine.grid_dim, &cluster = machine.cluster_dim;
  return {grid.x / cluster.x, grid.y / cluster.y, grid.z / cluster.z};
}

uint64_t cluster_of(uint64_t block) {
  const EmuDim index = at(block, machine.grid_dim), &cluster = machine.cluster_dim;
  return flat({index.x / cluster.x, index.y / cluster.y, index.z / cluster.z}, clusters());
}

EmuDim block_of(uint64_t cluster, unsigned rank) {
  const EmuDim first = at(cluster, clusters()), &size = machine.cluster_dim, own = at(rank, size);
  return {first.x * size.x + own.x, first.y * size.y + own.y, first.z * size.z + own.z};
}

// Clusters may run in any order; a kernel must not care.
std::vector<uint64_t> cluster_order(const Launch& launch) {
  std::vector<uint64_t> order;
  if (launch.blocks) {
    for (uint64_t i = 0; i < launch.block_count; ++i) {
      const uint64_t cluster = cluster_of(launch.blocks[i]);
      if (std::find(order.begin(), order.end(), cluster) == order.end()) order.push_back(cluster);
    }
  } else {
    order.resize(count(clusters()));
    std::iota(order.begin(), order.end(), uint64_t{0});
  }
  if (launch.schedule == Schedule::descending) std::reverse(order.begin(), order.end());
  if (launch.schedule >= Schedule::shuffled)
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[scheduling.below(i)]);
  return order;
}

// Shared memory begins each cluster without content. No kernel gets to see it, since reading what
// nobody wrote is a fault: should that check ever fail, the values still look wrong.
void blank_shared() {
  Launch& launch = *machine.launch;
  for (uint64_t i = 0; i < launch.window_count; ++i) {
    Window& window = launch.windows[i];
    if (window.space == Space::shared)
      memset(reinterpret_cast<void*>(window.start), 0xFF, window.end - window.start);
  }
}

void begin_launch(Launch& launch) {
  constexpr uint32_t last_epoch = 0xF0000000u;
  // If the last launch failed between an arrival and the wait, it has given epochs above its last.
  machine.epoch = std::max(machine.epoch, machine.together.after);
  if (machine.epoch > last_epoch) {
    machine.shadow.forget_accesses();
    machine.epoch = machine.together.after = 0;
  }
  machine.launch = &launch;
  machine.launch_epoch = machine.epoch + 1;
  machine.tick = 0;
  machine.grid_dim = {launch.grid[0], launch.grid[1], launch.grid[2]};
  machine.block_dim = {launch.block[0], launch.block[1], launch.block[2]};
  machine.cluster_dim = {launch.cluster[0], launch.cluster[1], launch.cluster[2]};
  machine.cluster_size = unsigned(count(machine.cluster_dim));
  machine.threads_count = launch.block[0] * launch.block[1] * launch.block[2];
  machine.warps_count = (machine.threads_count + warp_size - 1) / warp_size;
  each_warp([](unsigned w) { memset(static_cast<void*>(&machine.warps[w]), 0, sizeof(Warp)); });
  machine.fault = {};
  machine.windows.open(launch.windows, launch.window_count);
  for (uint64_t i = 0; i < launch.window_count; ++i)
    if (launch.windows[i].space == Space::shared)  // its cells may be too fine for this kernel
      machine.shadow.forget(launch.windows[i].start, launch.windows[i].end);
  number_threads();
  scheduling.seed(launch.seed);
  reset_accesses();
  starts.clear();
  clear_lookups();
  begin_launch_history();
}

}  // namespace

unsigned char* const dynamic_shared = reserve_shared();

int64_t block_of_epoch(uint32_t epoch, unsigned rank) {
  auto later = std::upper_bound(starts.begin(), starts.end(), epoch,
                                [](uint32_t e, const ClusterStart& s) { return e < s.epoch; });
  if (later == starts.begin()) return -1;
  return int64_t(flat(block_of((later - 1)->cluster, rank), machine.grid_dim));
}

void raise(Fault fault) {
  const Thread& thread = *machine.current;
  const EmuDim& block = machine.blocks[thread.rank].index;
  fault.block[0] = block.x;
  fault.block[1] = block.y;
  fault.block[2] = block.z;
  fault.thread[0] = thread.index.x;
  fault.thread[1] = thread.index.y;
  fault.thread[2] = thread.index.z;
  if (fault.other_thread >= 0) {
    const unsigned rank = rank_of(unsigned(fault.other_thread));
    if (fault.other_block < 0 && rank != thread.rank)
      fault.other_block = int64_t(flat(machine.blocks[rank].index, machine.grid_dim));
    fault.other_thread %= int32_t(max_threads);
  }
  fault.code = offset_in_library(fault.code);
  fault.other_code = offset_in_library(fault.other_code);
  machine.fault = fault;
  Context abandoned;
  switch_to(abandoned, machine.host);
  abort();  // nobody comes back to an abandoned fiber
}

}  // namespace emu

using namespace emu;

// 0, or 1 with *fault filled in.
EMU_API int emu_launch(Launch* launch, Fault* fault) {
  begin_launch(*launch);
  for (uint64_t cluster : cluster_order(*launch)) {
    for (unsigned rank = 0; rank < machine.cluster_size; ++rank)
      machine.blocks[rank].index = block_of(cluster, rank);
    starts.push_back({machine.epoch + 1, cluster});
    begin_cluster_history();
    blank_shared();
    run_cluster();
    if (machine.fault.kind != Kind::none) break;
  }
  machine.windows.collect_registered(launch->read_bytes, launch->written_bytes);
  machine.windows.open(nullptr, 0);
  launch->accesses = accesses_so_far();
  *fault = machine.fault;
  return fault->kind != Kind::none;
}

EMU_API void emu_register_window(const Window* window) { machine.windows.add_registered(*window); }
EMU_API void emu_unregister_window(uint64_t start, uint64_t end) {
  machine.windows.remove_registered(start, end);
}
EMU_API void emu_mark_uninitialised(uint64_t start, uint64_t end) {
  machine.shadow.mark_uninitialised(start, end);
}
EMU_API void emu_mark_initialised(uint64_t start, uint64_t end) {
  machine.shadow.mark_initialised(start, end);
}
EMU_API uint64_t emu_dynamic_shared_base() { return reinterpret_cast<uint64_t>(dynamic_shared); }
EMU_API uint64_t emu_dynamic_shared_capacity() { return dynamic_shared_capacity; }

// Finds where the library that holds `symbol` begins, and where its read-only part (code and constants)
// ends: 0 when found.
EMU_API int emu_image(void* symbol, uint64_t* start, uint64_t* end) {
  Dl_info info;
  if (!dladdr(symbol, &info)) return 1;
  struct Search {
    uint64_t base, end;
  } search{reinterpret_cast<uint64_t>(info.dli_fbase), UINT64_MAX};
  dl_iterate_phdr(
      [](dl_phdr_info* image, size_t, void* data) {
        auto* wanted = static_cast<Search*>(data);
        if (image->dlpi_addr != wanted->base) return 0;
        for (int i = 0; i < image->dlpi_phnum; ++i)
          if (image->dlpi_phdr[i].p_type == PT_LOAD && image->dlpi_phdr[i].p_flags & PF_W)
            wanted->end = std::min<uint64_t>(wanted->end,
                                             image->dlpi_addr + image->dlpi_phdr[i].p_vaddr);
        return 1;
      },
      &search);
  *start = search.base;
  *end = search.end;
  return search.end == UINT64_MAX;
}

EMU_API EmuDim emu_thread_index() { return machine.current->index; }
EMU_API EmuDim emu_block_index() { return machine.blocks[machine.current->rank].index; }
EMU_API EmuDim emu_block_dim() { return machine.block_dim; }
EMU_API EmuDim emu_grid_dim() { return machine.grid_dim; }
EMU_API EmuDim emu_cluster_dim() { return machine.cluster_dim; }
EMU_API unsigned emu_cluster_rank() { return machine.current->rank; }
EMU_API unsigned char* emu_dynamic_shared() {
  return dynamic_shared + machine.current->rank * dynamic_shared_capacity;
}

namespace {
[[noreturn]] void stop(Kind kind, Access access, uint64_t address, uint64_t size, void* code) {
  Fault fault{};
  fault.kind = kind;
  fault.access = access;
  fault.address = address;
  fault.size = size;
  fault.code = reinterpret_cast<uint64_t>(code);
  fault.window = no_window;
  fault.other_thread = -1;
  fault.other_block = -1;
  raise(fault);
}
}  // namespace

EMU_API void emu_trap() { stop(Kind::trap, Access::none, 0, 0, __builtin_return_address(0)); }
EMU_API void emu_stop(unsigned kind, unsigned access, unsigned long long address,
                      unsigned long long size) {
  stop(Kind(kind), Access(access), address, size, __builtin_return_address(0));
}
