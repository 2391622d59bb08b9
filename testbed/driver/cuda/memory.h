// Device memory is host memory between red zones; kernels reach it through the PTX machine's windows.
#pragma once
#include <cstdint>
#include <string>

#include "api.h"

namespace driver {

enum class Kind { pageable, pinned, device };

struct Allocation {
  uintptr_t start;
  size_t size;
  int device;
  Kind kind;
  bool registered;  // the caller's own memory, only pinned
  int64_t serial;
};

// The functions of the PTX machine's runtime that windows are opened with.
struct Windows {
  void (*open)(const void* window);
  void (*close)(uint64_t start, uint64_t end);
  void (*unwritten)(uint64_t start, uint64_t end);
  void (*written)(uint64_t start, uint64_t end);
};
void use_windows(const Windows& windows);

Result allocate(size_t size, int device, Kind kind, uintptr_t& start);
Result release(uintptr_t start, Kind kind);
Result pin(uintptr_t start, size_t size, int device);
Result unpin(uintptr_t start);
// The allocation that holds an address, if any does.
const Allocation* find(uintptr_t address);
const Allocation* find_serial(int64_t serial);
size_t used_bytes(int device);

// Finds the kind of [address, address + size). An error: it leaves its allocation, or was given back.
Result place(uintptr_t address, size_t size, Kind& kind);
Result copy(uintptr_t to, uintptr_t from, size_t size);
Result fill(uintptr_t to, size_t count, size_t width, uint32_t value);
// Opens to kernels of a device what it may reach: its own memory, its peers' and the host's.
void open_windows(int device);

}  // namespace driver
