// Memory for large results.

#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

struct Block {
    char* data;
    size_t size;
};

// So many bytes or a little more, undefined.
Block block_of(size_t size);

// Once nothing holds it, on whatever thread, also of a process that ends.
void keep(const Block& block) noexcept;

void define_results(nanobind::module_& module);
