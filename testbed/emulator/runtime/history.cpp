#include "history.h"

#include <algorithm>
#include <memory>
#include <unordered_map>
#include <vector>

namespace emu {

namespace {

constexpr uint64_t word = 4;  // atomics are listed by 4-byte word

// Accesses before a fence: earlier barrier intervals of the block and of the cluster, and of the
// fence's own interval what the fencing thread's warp knew.
struct Publication {
  uint32_t cluster_epoch, floor, joined;
  unsigned rank, warp;
  uint32_t synced;
  uint32_t known[warp_size];

  bool covers(uint32_t e, unsigned thread, uint32_t stamp) const {
    if (e < joined) return true;
    if (rank_of(thread) != rank) return false;
    if (e < floor) return true;
    return thread / warp_size == warp &&
           (stamp < synced || stamp < known[thread % warp_size]);
  }
};

struct Word {
  std::vector<AtomicTouch> touches;
  std::vector<const Publication*> releases;  // in the order in which their blocks ran
};

// A thread's atomic saw the first `count` releases of a word. The others of its block know of it
// as soon as they are ordered after that atomic.
struct Acquisition {
  const Word* word;
  size_t count;
  uint32_t epoch, stamp;
  unsigned thread;

  bool usable() const { return ordered_in_cluster(epoch, thread, stamp); }

  // Calls visit(publication) for those of the block that `e` belongs to, until it returns true.
  template <class Visit>
  bool any_of_block(uint32_t e, Visit visit) const {
    auto first = word->releases.begin();
    auto later = std::upper_bound(first, first + count, e, [](uint32_t key, const Publication* p) {
      return key < p->cluster_epoch;
    });
    if (later == first) return false;
    for (uint32_t block = (*(later - 1))->cluster_epoch;
         later != first && (*(later - 1))->cluster_epoch == block; --later)
      if (visit(**(later - 1))) return true;
    return false;
  }
};

std::unordered_map<uint64_t, Word> words;
std::vector<std::unique_ptr<Publication>> publications;
const Publication* last_fence[max_fibers];
std::vector<Acquisition> acquired;  // by this cluster

void acquire(const Word& at) {
  const Thread& now = *machine.current;
  if (at.releases.empty() || at.releases.front()->cluster_epoch == machine.cluster_epoch) return;
  acquired.push_back({&at, at.releases.size(), now.epoch, now.stamp, now.number});
}

// Did an earlier block, whose fence and atomic the current thread has seen, touch the word?
bool released(const AtomicTouch& touch) {
  return std::any_of(acquired.begin(), acquired.end(), [&](const Acquisition& acquisition) {
    return acquisition.usable() && acquisition.any_of_block(touch.epoch, [&](auto& publication) {
      return publication.cluster_epoch == touch.cluster_epoch;
    });
  });
}

}  // namespace

bool published(uint32_t epoch, unsigned thread, uint32_t stamp) {
  return std::any_of(acquired.begin(), acquired.end(), [&](const Acquisition& acquisition) {
    return acquisition.usable() && acquisition.any_of_block(epoch, [&](auto& publication) {
      return publication.covers(epoch, thread, stamp);
    });
  });
}

const AtomicTouch* unordered_atomic(uint64_t address, uint64_t size, bool shared) {
  for (uint64_t a = address & ~(word - 1); a < address + size; a += word) {
    auto found = words.find(a);
    if (found == words.end()) continue;
    for (const AtomicTouch& touch : found->second.touches) {
      if (touch.epoch >= machine.cluster_epoch) {
        if (!ordered_in_cluster(touch.epoch, touch.thread, touch.stamp)) return &touch;
      } else if (!shared && !released(touch)) {
        return &touch;
      }
    }
  }
  return nullptr;
}

namespace {
void add_touch(Word& at, const AtomicTouch& touch) {
  for (auto old = at.touches.rbegin(); old != at.touches.rend(); ++old) {
    if (old->cluster_epoch != touch.cluster_epoch) break;
    if (old->thread != touch.thread) continue;
    *old = touch;
    return;
  }
  at.touches.push_back(touch);
}
}  // namespace

void record_atomic(uint64_t address, uint64_t size) {
  const Thread& now = *machine.current;
  for (uint64_t a = address; a < address + size; a += word) {
    Word& at = words[a];
    acquire(at);
    const Publication* fence = last_fence[now.number];
    if (fence && (at.releases.empty() || at.releases.back() != fence)) at.releases.push_back(fence);
    add_touch(at, {machine.cluster_epoch, now.epoch, now.stamp, now.number});
  }
}

void forget_atomics(uint64_t address, uint64_t size) {
  for (uint64_t a = address & ~(word - 1); a < address + size; a += word) {
    auto found = words.find(a);
    if (found != words.end()) found->second.touches.clear();
  }
}

void begin_launch_history() {
  words.clear();
  publications.clear();
}

void begin_cluster_history() {
  acquired.clear();
  std::fill_n(last_fence, max_threads * machine.cluster_size, nullptr);
}

}  // namespace emu

using namespace emu;

EMU_API void emu_fence() {
  Thread& thread = *machine.current;
  const Warp& warp = machine.warps[thread.warp];
  auto publication = std::make_unique<Publication>();
  publication->cluster_epoch = machine.cluster_epoch;
  publication->floor = thread.floor;
  publication->joined = thread.joined;
  publication->rank = thread.rank;
  publication->warp = thread.warp;
  publication->synced = warp.synced;
  std::copy_n(warp.known[thread.lane], warp_size, publication->known);
  // Later accesses of this thread are not published: they carry a later stamp.
  thread.stamp = ++machine.tick;
  publication->known[thread.lane] = thread.stamp;
  last_fence[thread.number] = publication.get();
  publications.push_back(std::move(publication));
}
