// Finds arrays that share memory, by ranges of bytes alone.

#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "arrays.h"

// The bytes that an array covers: from `low` to before `high`.
struct Range {
    const char *low, *high;
    i64 array;
    bool written;
};

typedef std::vector<Range> Ranges;

// True if two elements may share memory; a yes may be wrong, and gradkit/_open/memory.py decides then.
bool overlaps_itself(const Py_buffer& array);

// An array without elements has no range.
void append(Ranges& ranges, const Py_buffer& array, i64 position, bool written);

// True if no range that is written meets another; they get another order.
bool lie_apart(Ranges& ranges);
