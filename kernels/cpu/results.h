// Memory for large results.

#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

struct Block {
    char* data;
    size_t size;
};

// Memory of `size` bytes or a little more, with undefined content.
Block block_of(size_t size);

// Keeps a block, which nothing holds any more, for later results. Any thread may call it, also while the
// process ends.
void keep(const Block& block) noexcept;

void define_results(nanobind::module_& module);
