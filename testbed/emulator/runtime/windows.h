// Addresses that a launch may touch: the windows of its own parameters, and those of arrays whose
// address was handed out beforehand, because it travels inside a struct or in device memory.
#pragma once
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "fault.h"

namespace emu {

enum class Space : uint32_t { global, shared, constant };

// Mirrored field by field in runtime.py.
struct Window {
  uint64_t start, end;
  uint32_t writable;
  Space space;
  uint32_t tracked;  // does memory in it need a shadow?
  uint32_t used;     // registered windows: are the counters listed to be summed?
  uint64_t read_bytes, written_bytes;
  int64_t id;
  uint32_t rank;  // of the block in its cluster that shared memory belongs to
  uint32_t padding;

  bool holds(uint64_t address, uint64_t size) const {
    return address >= start && address < end && size <= end - address;
  }
};

class Windows {
 public:
  // The windows of the launch at hand; they stay the caller's, who reads their counters later.
  void open(Window* windows, uint64_t count);

  void add_registered(const Window& window);
  void remove_registered(uint64_t start, uint64_t end);
  // Adds what went through registered windows since the last call, and starts again from 0.
  void collect_registered(uint64_t& read_bytes, uint64_t& written_bytes);

  // The window that allows the access; else nullptr, and `kind` and `nearest` say why not.
  Window* find(uint64_t address, uint64_t size, bool write, Kind& kind, int64_t& nearest);

 private:
  using Key = std::pair<uint64_t, uint64_t>;
  template <class Visit>
  void visit_registered(uint64_t address, Visit visit);
  Kind classify(uint64_t address, int64_t& nearest);

  Window* launch_ = nullptr;
  uint64_t count_ = 0;
  std::map<Key, Window> registered_;
  std::vector<Window*> used_;  // registered windows that counted something
  uint64_t longest_ = 0;       // bounds the walk back from an address
};

}  // namespace emu
