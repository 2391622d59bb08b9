#include "shadow.h"

#include <algorithm>
#include <vector>

namespace emu {

namespace {
// The coarsest cell whose boundaries include both ends of the access.
unsigned fitting_shift(uint64_t address, uint64_t size) {
  unsigned shift = coarsest;
  while ((address | size) & ((uint64_t{1} << shift) - 1)) --shift;
  return shift;
}
}  // namespace

Page* Shadow::page(uint64_t address, uint64_t size) {
  unsigned shift = fitting_shift(address, size);
  std::unique_ptr<Page>& page = pages_[address >> page_bits];
  if (!page) page = make(address >> page_bits, shift);
  if (page->shift > shift) split(*page, shift);
  return page.get();
}

std::unique_ptr<Page> Shadow::make(uint64_t number, unsigned shift) {
  auto page = std::make_unique<Page>();
  page->shift = shift;
  page->cells = std::make_unique<Cell[]>(page->count());
  for (unsigned i = 0; i < page->count(); ++i) page->cells[i].initialised = 1;
  uint64_t first = number << page_bits, last = first + page_bytes;
  auto range = uninitialised_.lower_bound(last);
  while (range != uninitialised_.begin()) {
    --range;
    if (range->second <= first) break;
    uint64_t from = std::max(range->first, first), to = std::min(range->second, last);
    const uint64_t cell = uint64_t{1} << shift;
    // A cell of which a part was written counts as written.
    for (uint64_t a = (from + cell - 1) / cell * cell; a + cell <= to; a += cell)
      page->at(a)->initialised = 0;
  }
  return page;
}

void Shadow::split(Page& page, unsigned shift) {
  Page finer{shift, nullptr};
  finer.cells = std::make_unique<Cell[]>(finer.count());
  unsigned pieces = 1u << (page.shift - shift);
  for (unsigned i = 0; i < finer.count(); ++i) finer.cells[i] = page.cells[i / pieces];
  page = std::move(finer);
}

// A range can hold billions of pages of which few exist: walk the shorter of the two.
template <class Visit>
void Shadow::visit_pages(uint64_t start, uint64_t end, Visit visit) {
  if (start >= end) return;
  uint64_t first = start >> page_bits, last = (end - 1) >> page_bits;
  std::vector<uint64_t> numbers;
  if (last - first < pages_.size()) {
    for (uint64_t n = first; n <= last; ++n)
      if (pages_.count(n)) numbers.push_back(n);
  } else {
    for (auto& entry : pages_)
      if (entry.first >= first && entry.first <= last) numbers.push_back(entry.first);
  }
  for (uint64_t n : numbers) visit(n);
}

void Shadow::set_initialised(uint64_t start, uint64_t end, bool value) {
  visit_pages(start, end, [&](uint64_t number) {
    uint64_t first = number << page_bits, last = first + page_bytes;
    if (start <= first && end >= last) {
      pages_.erase(number);  // made again when next touched, from uninitialised_
      return;
    }
    Page& page = *pages_[number];
    uint64_t from = std::max(start, first), to = std::min(end, last);
    const uint64_t cell = uint64_t{1} << page.shift;
    // A cell of which a part was written counts as written: the other part may be other memory's.
    if (!value) from += cell - 1, to = to / cell * cell;
    for (uint64_t a = from / cell * cell; a < to; a += cell) page.at(a)->initialised = value;
  });
}

void Shadow::mark_uninitialised(uint64_t start, uint64_t end) {
  if (start >= end) return;
  uninitialised_[start] = end;
  set_initialised(start, end, false);
}

void Shadow::mark_initialised(uint64_t start, uint64_t end) {
  auto range = uninitialised_.upper_bound(start);
  if (range != uninitialised_.begin()) --range;
  while (range != uninitialised_.end() && range->first < end) {
    const auto [from, to] = *range;
    if (to <= start) {
      ++range;
      continue;
    }
    range = uninitialised_.erase(range);
    if (from < start) uninitialised_[from] = start;
    if (to > end) uninitialised_[end] = to;
  }
  set_initialised(start, end, true);
}

void Shadow::forget(uint64_t start, uint64_t end) {
  visit_pages(start, end, [&](uint64_t number) { pages_.erase(number); });
}

void Shadow::forget_accesses() {
  for (auto& entry : pages_) {
    Page& page = *entry.second;
    for (unsigned i = 0; i < page.count(); ++i) {
      uint16_t initialised = page.cells[i].initialised;
      page.cells[i] = Cell{};
      page.cells[i].initialised = initialised;
    }
  }
}

}  // namespace emu
