#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>

#include "device.h"
#include "windows.h"

namespace driver {
namespace {

constexpr size_t alignment = 512, zone = 512;
constexpr uint8_t unwritten = 0xff, canary = 0xc5, freed = 0xfd;
constexpr size_t quarantine_bytes = size_t{64} << 20;

std::map<uintptr_t, Allocation>& live = *new std::map<uintptr_t, Allocation>;
std::map<uintptr_t, size_t>& given_back = *new std::map<uintptr_t, size_t>;
std::deque<uintptr_t>& oldest = *new std::deque<uintptr_t>;
size_t quarantined = 0;
size_t used[most_devices];  // bytes of each device
Windows windows{};
int opened_for = -1;
int64_t serials = 0;

bool reachable(const Allocation& allocation, int device) {
  return allocation.kind == Kind::pinned || allocation.device == device ||
         is_peer(device, allocation.device);
}

void open(const Allocation& allocation) {
  if (!windows.open || !allocation.size) return;
  emu::Window window{};
  window.start = allocation.start;
  window.end = allocation.start + allocation.size;
  window.writable = window.tracked = 1;
  window.space = emu::Space::global;
  window.id = ~allocation.serial;
  windows.open(&window);
}

void close(const Allocation& allocation) {
  if (windows.close && allocation.size)
    windows.close(allocation.start, allocation.start + allocation.size);
}

void keep(Allocation allocation) {
  allocation.serial = serials++;
  live[allocation.start] = allocation;
  if (opened_for < 0 || reachable(allocation, opened_for)) open(allocation);
}

std::string range(uintptr_t address, size_t size) {
  char text[64];
  snprintf(text, sizeof text, "%zu bytes at %#lx", size, (unsigned long)address);
  return text;
}

bool intact(const Allocation& allocation) {
  const auto* start = reinterpret_cast<const uint8_t*>(allocation.start);
  for (size_t i = 0; i < zone; ++i)
    if (start[-1 - ptrdiff_t(i)] != canary || start[allocation.size + i] != canary) return false;
  return true;
}

void quarantine(const Allocation& allocation) {
  memset(reinterpret_cast<void*>(allocation.start), freed, allocation.size);
  given_back[allocation.start] = allocation.size;
  oldest.push_back(allocation.start);
  quarantined += allocation.size;
  while (quarantined > quarantine_bytes) {
    const uintptr_t start = oldest.front();
    oldest.pop_front();
    quarantined -= given_back[start];
    given_back.erase(start);
    free(reinterpret_cast<void*>(start - zone));
  }
}

}  // namespace

void use_windows(const Windows& given) { windows = given; }

Result allocate(size_t size, int device, Kind kind, uintptr_t& start) {
  if (!size) return refuse(invalid_value, "an allocation of no bytes");
  if (kind == Kind::device && used_bytes(device) + size > memory_bytes())
    return refuse(out_of_memory, std::to_string(size) + " bytes do not fit on the device");
  const size_t all = (size + 2 * zone + alignment - 1) / alignment * alignment;
  void* block = aligned_alloc(alignment, all);
  if (!block) return refuse(out_of_memory, "the host has no memory left");
  memset(block, canary, all);
  start = reinterpret_cast<uintptr_t>(block) + zone;
  memset(reinterpret_cast<void*>(start), unwritten, size);
  keep({start, size, device, kind, false, 0});
  if (kind == Kind::device) used[device] += size;
  if (kind == Kind::device && windows.unwritten) windows.unwritten(start, start + size);
  return success;
}

Result release(uintptr_t start, Kind kind) {
  const auto found = live.find(start);
  if (found == live.end() || found->second.kind != kind || found->second.registered)
    return refuse(invalid_value, "nothing to give back: " + range(start, 0));
  const Allocation allocation = found->second;
  close(allocation);
  if (windows.written) windows.written(start, start + allocation.size);
  live.erase(found);
  if (kind == Kind::device) used[allocation.device] -= allocation.size;
  const bool whole = intact(allocation);
  quarantine(allocation);
  if (whole) return success;
  return break_device(illegal_address, "something wrote beside " + range(start, allocation.size));
}

Result pin(uintptr_t start, size_t size, int device) {
  if (find(start)) return refuse(host_already_registered, range(start, size));
  keep({start, size, device, Kind::pinned, true, 0});
  return success;
}

Result unpin(uintptr_t start) {
  const auto found = live.find(start);
  if (found == live.end() || !found->second.registered)
    return refuse(host_not_registered, range(start, 0));
  close(found->second);
  live.erase(found);
  return success;
}

const Allocation* find(uintptr_t address) {
  auto found = live.upper_bound(address);
  if (found == live.begin()) return nullptr;
  const Allocation& allocation = (--found)->second;
  return address - allocation.start < allocation.size ? &allocation : nullptr;
}

const Allocation* find_serial(int64_t serial) {
  for (const auto& [start, allocation] : live)
    if (allocation.serial == serial) return &allocation;
  return nullptr;
}

size_t used_bytes(int device) { return used[device]; }

Result place(uintptr_t address, size_t size, Kind& kind) {
  if (const Allocation* allocation = find(address)) {
    kind = allocation->kind;
    if (size <= allocation->start + allocation->size - address) return success;
    return refuse(invalid_value, range(address, size) + " leave their allocation");
  }
  kind = Kind::pageable;
  auto beyond = live.lower_bound(address);
  auto before = beyond;
  const bool below = beyond != live.end() && beyond->first < address + size + zone;
  const bool above = before != live.begin() &&
                     address - (--before)->first < before->second.size + zone &&
                     !before->second.registered;
  if (size && ((below && !beyond->second.registered) || above))
    return refuse(invalid_value, range(address, size) + " are beside an allocation");
  auto old = given_back.upper_bound(address);
  if (old != given_back.begin() && address - (--old)->first < old->second)
    return refuse(invalid_value, range(address, size) + " were given back");
  return success;
}

Result copy(uintptr_t to, uintptr_t from, size_t size) {
  Kind target, source;
  if (Result error = place(to, size, target)) return error;
  if (Result error = place(from, size, source)) return error;
  memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
  if (target == Kind::device && windows.written) windows.written(to, to + size);
  return success;
}

Result fill(uintptr_t to, size_t count, size_t width, uint32_t value) {
  Kind target;
  if (Result error = place(to, count * width, target)) return error;
  if (target == Kind::pageable) return refuse(invalid_value, "cuMemset of the host's memory");
  for (size_t i = 0; i < count; ++i) memcpy(reinterpret_cast<uint8_t*>(to) + i * width, &value, width);
  if (windows.written) windows.written(to, to + count * width);
  return success;
}

void open_windows(int device) {
  if (opened_for == device) return;
  for (const auto& [start, allocation] : live) {
    const bool was = opened_for < 0 || reachable(allocation, opened_for);
    const bool is = device < 0 || reachable(allocation, device);
    if (is && !was) open(allocation);
    if (was && !is) close(allocation);
  }
  opened_for = device;
}

}  // namespace driver
