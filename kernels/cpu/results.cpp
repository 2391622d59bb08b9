// Memory for results. When nothing holds it, it is kept for the next ones: another step has results of
// the same sizes, and the page faults of new memory take longer than most operations.
//
// Large blocks the system may take when it needs memory; to allow that takes longer than small ones are
// worth, of which less is kept.

#include "results.h"

#include <nanobind/ndarray.h>

#include <cstdint>
#include <mutex>
#include <new>
#include <vector>

#if __has_include(<sys/mman.h>)
#include <sys/mman.h>
#endif

namespace nb = nanobind;

namespace {

constexpr size_t HUGE_PAGE = size_t{1} << 21, PAGES = size_t{1} << 16;
constexpr size_t WORTH_LENDING = size_t{1} << 22;  // to the system
constexpr size_t MOST_KEPT = size_t{1} << 28, MOST_OF_SMALL = size_t{1} << 25;

#ifdef MADV_FREE

// Whole huge pages, which all begin where those do: of others the system makes small ones.
char* from_system(size_t size) {
    const size_t beside = size < WORTH_LENDING ? 0 : HUGE_PAGE;
    void* const mapped = mmap(
        nullptr, size + beside, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0
    );
    if (mapped == MAP_FAILED) return nullptr;
    if (!beside) return static_cast<char*>(mapped);
    const size_t before = -reinterpret_cast<std::uintptr_t>(mapped) % HUGE_PAGE;
    char* const data = static_cast<char*>(mapped) + before;
    if (before) munmap(mapped, before);
    munmap(data + size, HUGE_PAGE - before);
#ifdef MADV_HUGEPAGE
    madvise(data, size, MADV_HUGEPAGE);
#endif
    return data;
}

void to_system(const Block& block) { munmap(block.data, block.size); }

// True if the system may have it from now on, and it can be written to nevertheless.
bool can_be_kept(const Block& block) { return madvise(block.data, block.size, MADV_FREE) == 0; }

#else

char* from_system(size_t size) {
    return static_cast<char*>(operator new(size, std::align_val_t(HUGE_PAGE), std::nothrow));
}

void to_system(const Block& block) { operator delete(block.data, std::align_val_t(HUGE_PAGE)); }

bool can_be_kept(const Block&) { return false; }

#endif

// Blocks that nothing holds, the oldest first: large ones, or small ones. Nobody waits for the lock, which
// after a fork may be held for good: blocks then come from the system, and go to it.
class Kept {
public:
    // Nothing is thrown when a result is freed.
    Kept(size_t most, size_t least) : most_(most) { blocks_.reserve(most / least); }

    // A block of this size or a little more, if there is one: the last of the best.
    Block take(size_t size) {
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        if (!lock) return {};
        auto best = blocks_.end();
        for (auto each = blocks_.begin(); each != blocks_.end(); ++each)
            if (each->size >= size && each->size <= size + size / 4 &&
                (best == blocks_.end() || each->size <= best->size))
                best = each;
        if (best == blocks_.end()) return {};
        const Block block = *best;
        blocks_.erase(best);
        total_ -= block.size;
        return block;
    }

    void keep(const Block& block) {
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        const bool lends = block.size >= WORTH_LENDING;
        if (!lock || block.size > most_ || (lends && !can_be_kept(block))) {
            to_system(block);
            return;
        }
        while (total_ + block.size > most_) drop_oldest();
        blocks_.push_back(block);
        total_ += block.size;
    }

    void drop_all() {
        const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
        while (lock && !blocks_.empty()) drop_oldest();
    }

private:
    void drop_oldest() {
        total_ -= blocks_.front().size;
        to_system(blocks_.front());
        blocks_.erase(blocks_.begin());
    }

    const size_t most_;
    std::mutex mutex_;
    std::vector<Block> blocks_;
    size_t total_ = 0;
};

// Blocks of a size, for as long as the process: results may outlive the module.
Kept& kept(size_t size) {
    static Kept& small = *new Kept(MOST_OF_SMALL, PAGES);
    static Kept& large = *new Kept(MOST_KEPT, WORTH_LENDING);
    return size < WORTH_LENDING ? small : large;
}

using Bytes = nb::ndarray<nb::numpy, std::uint8_t, nb::ndim<1>, nb::c_contig>;

Bytes memory(size_t size) {
    Block* const block = new Block(block_of(size));
    const nb::capsule owner(block, [](void* held) noexcept {
        keep(*static_cast<Block*>(held));
        delete static_cast<Block*>(held);
    });
    return Bytes(block->data, {size}, owner);
}

}  // namespace

Block block_of(size_t size) {
    const size_t pages = size < WORTH_LENDING ? PAGES : HUGE_PAGE;
    const size_t whole = (size + pages - 1) / pages * pages;
    Block block = kept(whole).take(whole);
    if (!block.data) block = {from_system(whole), whole};
    if (!block.data) {
        for (const size_t each : {PAGES, WORTH_LENDING}) kept(each).drop_all();
        block.data = from_system(whole);
    }
    if (!block.data) throw std::bad_alloc();
    return block;
}

void keep(const Block& block) noexcept { kept(block.size).keep(block); }

void define_results(nb::module_& module) { module.def("memory", &memory); }
