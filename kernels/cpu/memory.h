// The memory of what Python passes: NumPy's arrays, tensors, and whatever has its buffer protocol.

#pragma once

#include <nanobind/nanobind.h>

#include "arrays.h"

// Whether an object is a numpy.ndarray, of no class of someone's own.
bool is_numpys(PyObject* object);

// The dtype of one of those, which the array holds.
nanobind::handle dtype_of(PyObject* array);

// Whether it is one of those that gradkit calls floating-point dtypes.
bool is_floating(nanobind::handle dtype);

// The number of one that kernels have.
Dtype number_of(nanobind::handle dtype);

// Where an array's memory is, for as long as the caller holds the array and releases the buffer.
// Strides are written to `strides` if they lie nowhere else. Returns the dtype's number, as above; -1 if
// a tensor's has none, or if only `buffer.obj` tells it.
int open_memory(PyObject* array, Py_buffer& buffer, Py_ssize_t (&strides)[MOST_AXES]);
