#include "windows.h"

#include <algorithm>

namespace emu {

void Windows::open(Window* windows, uint64_t count) {
  launch_ = windows;
  count_ = count;
}

void Windows::add_registered(const Window& window) {
  registered_[{window.start, window.end}] = window;
  longest_ = std::max(longest_, window.end - window.start);
}

void Windows::remove_registered(uint64_t start, uint64_t end) { registered_.erase({start, end}); }

void Windows::collect_registered(uint64_t& read_bytes, uint64_t& written_bytes) {
  for (Window* window : used_) {
    read_bytes += window->read_bytes;
    written_bytes += window->written_bytes;
    window->read_bytes = window->written_bytes = 0;
    window->used = 0;
  }
  used_.clear();
}

// Calls visit(window) for each registered window that could reach `address`, until it returns true.
template <class Visit>
void Windows::visit_registered(uint64_t address, Visit visit) {
  auto it = registered_.upper_bound({address, UINT64_MAX});
  while (it != registered_.begin()) {
    --it;
    if (address - it->second.start > longest_) return;
    if (visit(it->second)) return;
  }
}

Window* Windows::find(uint64_t address, uint64_t size, bool write, Kind& kind, int64_t& nearest) {
  Window* found = nullptr;
  Window* readable = nullptr;
  auto accept = [&](Window& window) {
    if (!window.holds(address, size)) return false;
    if (write && !window.writable) {
      readable = &window;
      return false;
    }
    found = &window;
    return true;
  };
  for (uint64_t i = 0; i < count_; ++i)
    if (accept(launch_[i])) return found;
  visit_registered(address, accept);
  if (found) {
    if (!found->used) used_.push_back(found);
    found->used = 1;
    return found;
  }
  if (readable) {
    kind = Kind::read_only;
    nearest = readable->id;
  } else {
    kind = classify(address, nearest);
  }
  return nullptr;
}

namespace {
// Prefers the array that lies below: running past an end is the commoner mistake.
uint64_t distance(const Window& window, uint64_t address) {
  if (address >= window.start) return address - std::min(address, window.end);
  return 2 * (window.start - address);
}
}  // namespace

Kind Windows::classify(uint64_t address, int64_t& nearest) {
  uint64_t best = UINT64_MAX;
  auto consider = [&](const Window& window) {
    if (window.space == Space::constant) return;
    uint64_t away = distance(window, address);
    if (away < best) {
      best = away;
      nearest = window.id;
    }
  };
  nearest = no_window;
  for (uint64_t i = 0; i < count_; ++i) consider(launch_[i]);
  auto above = registered_.lower_bound({address, 0});
  if (above != registered_.end()) consider(above->second);
  if (above != registered_.begin()) consider(std::prev(above)->second);
  // Nearer to 0 than to any array: an index on a null pointer.
  if (address < best) {
    nearest = no_window;
    return Kind::null_pointer;
  }
  return Kind::out_of_bounds;
}

}  // namespace emu
