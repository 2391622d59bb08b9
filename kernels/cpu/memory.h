// The memory of objects that Python passes: NumPy's arrays, tensors, and any with the buffer protocol.

#pragma once

#include <nanobind/nanobind.h>

#include "arrays.h"

// True if an object is a numpy.ndarray, and of no subclass.
bool is_numpys(PyObject* object);

// The dtype of a numpy.ndarray: a borrowed reference.
nanobind::handle dtype_of(PyObject* array);

// True if gradkit counts a dtype as floating-point.
bool is_floating(nanobind::handle dtype);

// The number of a dtype that kernels have.
Dtype number_of(nanobind::handle dtype);

// Opens an array's memory, which is valid as long as the caller holds the array and the buffer.
// Strides are written to `strides` if they lie nowhere else. Returns the dtype's number, as above; -1 if
// a tensor's has none, or if only `buffer.obj` tells it.
int open_memory(PyObject* array, Py_buffer& buffer, Py_ssize_t (&strides)[MOST_AXES]);
