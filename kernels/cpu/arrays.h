// Arrays as rows and columns, at any strides.

#pragma once

#include <cstdint>

typedef int64_t i64;

// In what order dtypes are numbered, as in gradkit/_dtypes.py.
enum Dtype { F16, BF16, F32, F64 };

constexpr int MOST_AXES = 64;  // NumPy's own limit

struct Axis {
    i64 length, stride;  // in bytes
};

// Axes of a length other than 1, outermost first; neighbours that one stride leads through are one.
struct Axes {
    int count;
    Axis at[MOST_AXES];
};

// An array of rows, each of which has columns. A statistic has none.
struct Array {
    char* data;
    Axes rows, columns;
};
