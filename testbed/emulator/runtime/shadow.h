// The shadow: for each cell of memory, who wrote it last, who has read it since, and whether
// anybody wrote it at all. Pages of cells are made when first touched, so that an array of 2^33
// elements, of which a test touches one row, costs no more than that row.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>

namespace emu {

// An epoch is one barrier interval of one block; numbers only grow, over all launches. Threads are
// numbered through a cluster (see machine.h).
// A stamp orders the lanes of one warp inside an epoch (see machine.h).
struct Cell {
  uint32_t write_epoch, write_stamp;
  uint32_t read_epoch, read_stamp;
  uint32_t read_lanes;  // lanes of one warp whose reads no order relates
  uint16_t writer : 13, initialised : 1, atomic : 1;
  // `scattered`: several threads of the cluster have read, the last of them in `read_epoch`.
  uint16_t reader : 13, many_warps : 1, other_block : 1, scattered : 1;
};
static_assert(sizeof(Cell) == 24, "the shadow's size decides its speed");

constexpr unsigned page_bits = 12;
constexpr uint64_t page_bytes = uint64_t{1} << page_bits;
constexpr unsigned coarsest = 3;  // log2 of the bytes in a cell, at most

struct Page {
  unsigned shift;  // log2 of the bytes in a cell: a finer access splits the page's cells
  std::unique_ptr<Cell[]> cells;

  Cell* at(uint64_t address) { return &cells[(address & (page_bytes - 1)) >> shift]; }
  unsigned count() const { return unsigned(page_bytes >> shift); }
};

class Shadow {
 public:
  // The page that holds `address`, with cells that begin and end with [address, address + size).
  Page* page(uint64_t address, uint64_t size);

  // Memory that nobody has written yet; its bytes are 0xFF.
  void mark_uninitialised(uint64_t start, uint64_t end);
  // Memory that was given back, or that the host wrote.
  void mark_initialised(uint64_t start, uint64_t end);
  // Forgets everything about a range of whole pages.
  void forget(uint64_t start, uint64_t end);
  // Lets epochs start anew: no cell remembers any access.
  void forget_accesses();

 private:
  std::unique_ptr<Page> make(uint64_t number, unsigned shift);
  void split(Page& page, unsigned shift);
  void set_initialised(uint64_t start, uint64_t end, bool value);
  template <class Visit>
  void visit_pages(uint64_t start, uint64_t end, Visit visit);

  std::unordered_map<uint64_t, std::unique_ptr<Page>> pages_;
  std::map<uint64_t, uint64_t> uninitialised_;  // start -> end of memory born without content
};

}  // namespace emu
