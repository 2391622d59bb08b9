#include "device.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "api.h"
#include "memory.h"
#include "work.h"

namespace driver {
namespace {

std::map<std::string, Calls*>& known() {
  static auto* const all = new std::map<std::string, Calls*>;
  return *all;
}
struct Plan {
  long after, times;
  Result failure;
};
std::map<std::string, Plan>& plans() {  // of functions that were not called yet
  static auto* const all = new std::map<std::string, Plan>;
  return *all;
}

Result sticky = success;
std::string& why = *new std::string;
bool peers[most_devices][most_devices];

long setting(const char* name, long otherwise) {
  const char* const text = getenv(name);
  return text ? atol(text) : otherwise;
}

}  // namespace

Calls::Calls(const char* function) : name(function) {
  known()[name] = this;
  const auto plan = plans().find(name);
  if (plan == plans().end()) return;
  fails_at = plan->second.after;
  fails = plan->second.times;
  failure = plan->second.failure;
  plans().erase(plan);
}

Result Calls::enter() {
  ++count;
  if (!fails_at || count < fails_at || count >= fails_at + fails) return success;
  return refuse(failure, std::string(name) + " fails on request");
}

Result broken() { return sticky; }
Result unusable() {
  if (sticky || has_context()) return sticky;
  return refuse(no_context, "no context is current in this thread, which made no call of the runtime");
}
Result break_device(Result code, std::string message) {
  if (!sticky) why = std::move(message);
  return sticky = sticky ? sticky : code;
}
Result refuse(Result code, std::string message) {
  if (!sticky) why = std::move(message);
  return code;
}
const std::string& last_message() { return why; }

int device_count() {
  static const int count = int(setting("TESTBED_DRIVER_DEVICES", 2));
  return std::min(count, most_devices);
}
size_t memory_bytes() {
  static const size_t bytes = size_t(setting("TESTBED_DRIVER_MEMORY", 2l << 30));
  return bytes;
}
int multiprocessors() {
  static const int count = int(setting("TESTBED_DRIVER_MULTIPROCESSORS", 2));
  return count;
}
int max_shared_memory() { return 227 << 10; }
int& current_device() {
  static thread_local int device = 0;
  return device;
}
bool& has_context() {
  static thread_local bool has = false;
  return has;
}
bool is_peer(int from, int to) { return peers[from][to]; }

namespace {
bool runs = true;

int capability() {
  static const int number = int(setting("TESTBED_DRIVER_ARCHITECTURE", 80));
  return number;
}

int attribute(int number) {
  switch (number) {
    case 1: case 2: case 3: return number == 3 ? 64 : 1024;  // a block's threads: all, x, y
    case 4: return 64;                                       // z
    case 5: return 0x7fffffff;                               // a grid's blocks: x, y, z
    case 6: case 7: return 65535;
    case 8: return 48 << 10;                                 // shared memory of a block
    case 9: return 64 << 10;                                 // constant memory
    case 10: return 32;                                      // a warp's threads
    case 12: return 65536;                                   // registers of a block
    case 13: return 1000000;                                 // kHz
    case 14: return 512;                                     // a texture's alignment
    case 16: return multiprocessors();
    case 31: return 1;                                       // concurrent kernels
    case 36: return 1000000;                                 // kHz of the memory
    case 37: return 512;                                     // its bits
    case 38: return 4 << 20;                                 // bytes of cache
    case 39: return 2048;                                    // a multiprocessor's threads
    case 40: return 1;                                       // copy engines
    case 41: return 1;                                       // one address space
    case 75: return capability() / 10;
    case 76: return capability() % 10;
    case 81: return max_shared_memory();                     // of a multiprocessor
    case 82: return 65536;
    case 95: return 1;                                       // cooperative launches
    case 97: return max_shared_memory();
    default: return 0;
  }
}

}  // namespace

bool launches_run() { return runs; }

}  // namespace driver

using namespace driver;

// Errors and versions

API Result cuInit(unsigned) { return success; }
// NVRTC asks, and goes on without; CUDA's runtime, as it is linked into cuDNN, needs several.
API Result cuGetExportTable(const void** table, const unsigned char* name) {
  const Held held;
  std::string text;
  for (int k = 0; k < 16; ++k) {
    char digits[4];
    snprintf(digits, sizeof digits, k == 4 || k == 6 || k == 8 || k == 10 ? "-%02x" : "%02x", name[k]);
    text += digits;
  }
  *table = nullptr;
  return refuse(not_found, "testbed.driver has no export table " + text);
}
API Result cuDriverGetVersion(int* version) {
  *version = 13000;
  return success;
}
API Result cuGetErrorName(Result code, const char** name) {
  static thread_local char text[40];
  snprintf(text, sizeof text, "CUDA_ERROR_%d", int(code));
  *name = text;
  return success;
}
API Result cuGetErrorString(Result, const char** text) {
  const Held held;
  *text = last_message().c_str();
  return success;
}
API Result cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  static void* const self = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
  for (const char* suffix : {"_v2", ""})
    if ((*function = dlsym(self, (std::string(name) + suffix).c_str()))) break;
  if (status) *status = *function ? 0 : 1;
  return *function ? success : not_found;
}
API Result cuGetProcAddress(const char* name, void** function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, nullptr);
}

// Devices and contexts; a device's context is its number and 1

API Result cuDeviceGetCount(int* count) {
  *count = device_count();
  return success;
}
API Result cuDeviceGet(int* device, int number) {
  if (number < 0 || number >= device_count()) return invalid_device;
  *device = number;
  return success;
}
API Result cuDeviceGetName(char* name, int length, int device) {
  if (device < 0 || device >= device_count()) return invalid_device;
  snprintf(name, size_t(length), "testbed.driver %d", device);
  return success;
}
API Result cuDeviceTotalMem_v2(size_t* bytes, int) {
  *bytes = memory_bytes();
  return success;
}
API Result cuDeviceGetAttribute(int* value, int number, int device) {
  if (device < 0 || device >= device_count()) return invalid_device;
  *value = attribute(number);
  return success;
}
API Result cuDeviceCanAccessPeer(int* can, int device, int other) {
  if (std::min(device, other) < 0 || std::max(device, other) >= device_count())
    return invalid_device;
  *can = device != other;
  return success;
}
API Result cuCtxGetCurrent(void** context) {
  *context = reinterpret_cast<void*>(has_context() ? uintptr_t(current_device()) + 1 : 0);
  return success;
}
API Result cuCtxSetCurrent(void* context) {
  has_context() = false;
  if (!context) return success;
  const auto number = reinterpret_cast<uintptr_t>(context);
  if (number < 1 || number > uintptr_t(device_count())) return invalid_device;
  current_device() = int(number) - 1;
  has_context() = true;
  return success;
}
API Result cuCtxGetDevice(int* device) {
  if (Result error = unusable()) return error;
  *device = current_device();
  return success;
}
API Result cuDevicePrimaryCtxRetain(void** context, int device) {
  if (device < 0 || device >= device_count()) return invalid_device;
  *context = reinterpret_cast<void*>(uintptr_t(device) + 1);
  return success;
}
API Result cuDevicePrimaryCtxRelease_v2(int) { return success; }
API Result cuCtxSynchronize() {
  ENTER(cuCtxSynchronize);
  if (Result error = forbidden_in_capture()) return error;
  return run_device(current_device());
}
API Result cuCtxEnablePeerAccess(void* context, unsigned) {
  ENTER(cuCtxEnablePeerAccess);
  const auto number = reinterpret_cast<uintptr_t>(context);
  if (number < 1 || number > uintptr_t(device_count())) return invalid_device;
  bool& enabled = peers[current_device()][number - 1];
  if (enabled) return peer_already_enabled;
  open_windows(-1);
  enabled = true;
  return success;
}

// Memory

API Result cuMemAlloc_v2(uintptr_t* start, size_t size) {
  ENTER(cuMemAlloc_v2);
  if (Result error = forbidden_in_capture()) return error;
  return allocate(size, current_device(), Kind::device, *start);
}
namespace {
std::vector<std::pair<uintptr_t, Kind>>& to_release = *new std::vector<std::pair<uintptr_t, Kind>>;

// As CUDA does, when all work is done; of what a finaliser gives back meanwhile, later.
Result release_when_idle(uintptr_t start, Kind kind) {
  if (running()) {
    to_release.push_back({start, kind});
    return success;
  }
  for (int device = 0; device < device_count(); ++device) run_device(device);
  while (!to_release.empty()) {
    const auto [other, its_kind] = to_release.back();
    to_release.pop_back();
    release(other, its_kind);
  }
  return release(start, kind);
}
}  // namespace
API Result cuMemFree_v2(uintptr_t start) {
  ENTER_EVEN_BROKEN(cuMemFree_v2);
  if (!start) return success;
  if (Result error = forbidden_in_capture()) return error;
  return release_when_idle(start, Kind::device);
}
API Result cuMemHostAlloc(uintptr_t* start, size_t size, unsigned) {
  ENTER(cuMemHostAlloc);
  if (Result error = forbidden_in_capture()) return error;
  return allocate(size, current_device(), Kind::pinned, *start);
}
API Result cuMemFreeHost(uintptr_t start) {
  ENTER_EVEN_BROKEN(cuMemFreeHost);
  if (!start) return success;
  return release_when_idle(start, Kind::pinned);
}
API Result cuMemHostRegister_v2(uintptr_t start, size_t size, unsigned) {
  ENTER(cuMemHostRegister_v2);
  return pin(start, size, current_device());
}
API Result cuMemHostUnregister(uintptr_t start) {
  ENTER(cuMemHostUnregister);
  return unpin(start);
}
API Result cuMemGetInfo_v2(size_t* left, size_t* all) {
  ENTER(cuMemGetInfo_v2);
  *all = memory_bytes();
  *left = *all - used_bytes(current_device());
  return success;
}

// Functions that only tests call

API void driver_use_windows(const Windows* windows) { use_windows(*windows); }
API void driver_launches_run(int chosen) { runs = chosen != 0; }
API long driver_calls(const char* name) {
  const auto found = known().find(name);
  return found == known().end() ? 0 : found->second->count;
}
API void driver_fail(const char* name, int code, long after, long times) {
  const auto found = known().find(name);
  if (found == known().end()) {
    plans()[name] = {after, times, Result(code)};
    return;
  }
  found->second->fails_at = after ? found->second->count + after : 0;
  found->second->fails = times;
  found->second->failure = Result(code);
}
API const char* driver_message() { return last_message().c_str(); }
API int driver_mend() {
  const Result was = sticky;
  sticky = success;
  return was;
}
API int driver_extent(int64_t serial, uint64_t* start, uint64_t* end) {
  const Allocation* const found = find_serial(serial);
  if (!found) return 0;
  *start = found->start;
  *end = found->start + found->size;
  return 1;
}
